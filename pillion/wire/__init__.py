"""Defines what travels between components, and its conversion to the values that the code works with.

    public.py     the public service: requests, deltas and status, as messages and as the SDK's frozen values
    decode.py     the deltas of a decode step; plain tuples, because one is made for every token
    attach.py     the JSON lines of a KV node's attach socket
    json_lines.py messages that are one line of JSON each
    registry.py   the record that a component's heartbeat writes to Redis
    common.py     the hello between two components, with the rule for different versions
    errors.py     errors as rich gRPC statuses, and back

Open public.py first. Other internal services use their generated messages as they are. No policy comes in here.
"""
