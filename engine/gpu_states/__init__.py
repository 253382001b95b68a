"""Runs layers that carry a state from token to token on GPUs (docs/decisions/states.md): a room.

- `gpu_states` has the buffers of such layers, and calls their kernels.
- `state_record` brings to the device what a step's kernels read of its sequences.
"""
