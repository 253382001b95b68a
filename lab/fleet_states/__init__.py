"""Adds models whose layers carry a state to simulated fleets (docs/decisions/states.md)."""
