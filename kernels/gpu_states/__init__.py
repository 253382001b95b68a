"""Triton kernels of layers that carry a state from token to token (hybrid models).

Open ``gpu_convolutions.py`` first, then ``state_places.py``, which explains chunks. A kernel reads each state once, in
place, and writes the state after the step's tokens once, into other slots. A sequence's tokens are computed the same
way whatever else the step contains, so a state has the same bits however its text was cut. References in torch:
``kernels/torch/recurrences.py``.
"""
