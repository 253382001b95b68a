"""Defines how components reach each other.

- `rpc`: starts gRPC servers, opens channels, turns errors into statuses. Open it first.
- `reflection_servicer`: tells clients which services and messages a server has.
- `in_process`: the same calls without sockets, for components in one process (a room's).
- `addresses`: which addresses are local.
- `private_socket`: Unix sockets of one user, and lines beside which descriptors travel.
- `tls`: certificates at the edge and between components. `watched`: files that may be replaced while a process runs.

No service's logic comes in here: messages are in `pillion.wire`, servicers with their services.
"""
