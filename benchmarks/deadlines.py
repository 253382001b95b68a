"""Goodput under deadlines beyond what a cluster serves: answers that are whole in time, at 1, 2, 5 and 10 times the load.
"""
