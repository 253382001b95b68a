"""Has the Triton kernels of layers that carry a state from token to token (hybrid models).

    state_places.py        where a kernel finds a sequence's state in slots of the pool, and what a step's record says
    gpu_convolutions.py    convolutions over the last tokens of a sequence
    gpu_delta_rule.py      the gated delta rule
    gpu_state_spaces.py    Mamba-2
    gpu_gates.py           norms and gates of what these have found
    state_specs.py         the uses that are built ahead of time

Open ``gpu_convolutions.py`` first. A kernel reads each state once, from where it lies, and writes the state after the
step's tokens once, into other slots. Each token of a sequence is computed in the same way, whatever the step has beside
it, so a state has the same bits however its text was cut. References in torch: ``kernels/torch/recurrences.py``.
"""
