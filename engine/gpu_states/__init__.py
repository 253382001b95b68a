"""Runs layers that carry a state from token to token on GPUs (docs/decisions/states.md)."""
