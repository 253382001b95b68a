"""A gateway's connections to other components. Open cluster.py first.

Decisions are made elsewhere: in a request's state machine and the planner.
"""
