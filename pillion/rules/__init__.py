"""Rules about requests that several components must agree on.

    priority.py         the order of requests in all queues
    grammar_limits.py   limits of the cost of a grammar, equal at the gateway and at the worker
    weighted_limit.py   a limit of the work in progress, first come, first served

Each queue decides what waits in it, and for how long.
"""
