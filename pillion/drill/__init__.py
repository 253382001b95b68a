"""Kills or pauses one component of each kind of a live cluster, and compares what that costs with a contract.

drill.py       one drill: refuses or begins, strikes one component after the other; open this first
strikes.py     which components are struck, what starts them again, and how a signal reaches them
streams.py     the drill's own load, and the pauses of its streams
contract.py    the most that a strike may cost, from a file; what a strike did cost
report.py      the table, JSON, and metrics for a text file of Prometheus

Nothing in the components knows of a drill: it sees what a client and an operator see.
"""
