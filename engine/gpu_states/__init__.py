"""Layers with a recurrent state on GPUs (docs/decisions/states.md)."""
