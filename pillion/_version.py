"""The release, in one place; pyproject.toml holds the same number and a test compares them."""

VERSION = "0.1.0"

# Grows when a message changes meaning (see protos/pillion/v1/common.proto).
PROTOCOL = 1
