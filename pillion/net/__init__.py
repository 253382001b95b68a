"""How components reach each other.

No logic of services: messages are in `pillion.wire`, servicers with their services.
    rpc                 gRPC servers and channels; open it first
    addresses           local addresses                 tls                 certificates
    descriptors         connections per port            silent_connections  closed before a port is full
    in_process          calls within one process        private_socket      Unix sockets of one user
    reflection_servicer gRPC's reflection               watched             files that are read again
"""
