"""Measurements against a peer or a physical limit taken in the same run; results are JSON and a table."""
