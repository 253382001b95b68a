"""Rules about requests that several components must agree on.

    priority.py         the one order in which requests wait, wherever they wait
    grammar_limits.py   limits of the cost of a grammar, equal at the gateway and at the worker
    weighted_limit.py   a limit of the work in progress, first come, first served

What waits, and for how long, is decided where it waits.
"""
