"""Connects a gateway to other components. Open cluster.py first.

No decision is made here: the state machine of a request and the planner do that.
"""
