"""The release number; pyproject.toml has the same number, and a test compares them."""

VERSION = "0.3.0"

# The protocol's number grows by one when a message changes meaning (see protos/pillion/v1/common.proto), and by two
# when components of the previous release could not even read it. With 7, which 0.2.0 speaks, decode workers open
# tickets and lease slots in the same call. With 8, KV nodes keep states of hybrid models; nodes of 7 would mistake a
# state for blocks of the chain, so workers of such models refuse them.
PROTOCOL = 8
STATES_PROTOCOL = 8
