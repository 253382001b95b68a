"""Keeps chains of blocks in a pool until the time at which their next turn is expected."""
