"""The release, in one place; pyproject.toml holds the same number and a test compares them."""

VERSION = "0.1.0"

# Grows when a message changes meaning (see protos/pillion/v1/common.proto), and by two where a neighbour could not even
# read it. 3: a line to an attach socket names its sender component_id.
PROTOCOL = 3
