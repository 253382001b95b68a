"""Holds the rules about requests that several components must agree on.

    priority.py         the one order in which requests wait, wherever they wait
    grammar_limits.py   what a grammar may cost, at the gateway as in the worker that follows it
    weighted_limit.py   a bound on the work that is under way, first come, first served

What waits and how long is decided where it waits.
"""
