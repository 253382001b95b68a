"""Holds the number of the release; pyproject.toml holds the same number and a test compares them."""

VERSION = "0.2.0"

# The number of the protocol grows by one when a message changes meaning (see protos/pillion/v1/common.proto), and by
# two when components of the release before could not even read it. With 7, decode workers open tickets, and lease slots
# with the same call, which KV nodes of protocol 5 do not do.
PROTOCOL = 7
