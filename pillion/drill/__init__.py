"""Drills: kills or pauses one component of each kind of a live cluster, and compares the cost with a contract.

drill.py       one drill: refuses or begins, strikes one component after the other; open this first
strikes.py     which components to strike, what restarts them, and how to signal them
streams.py     the drill's own load, and the pauses of its streams
contract.py    limits for the cost of a strike, from a file; and the cost itself
report.py      the table, JSON, and metrics for a text file of Prometheus

Components are unaware of drills, which only see what clients and operators see.
"""
