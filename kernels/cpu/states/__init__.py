"""Kernels of recurrent layers: convolutions, the gated delta rule, state spaces.

Open ``convolutions.py`` first. A kernel reads each state once, in its slots, and writes the state after the step's
tokens once, into other slots. A token's arithmetic does not depend on the other tokens of the step, so a state has the
same bits however its text was cut into steps. References in torch: ``kernels/torch/recurrences.py``.
"""
