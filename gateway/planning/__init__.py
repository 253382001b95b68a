"""Decides where a request runs and where its prompt is split, without I/O (I9). Open planner.py first.

No clock, no connection and no token ids come in here.
"""
