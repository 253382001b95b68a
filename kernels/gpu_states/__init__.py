"""Has the Triton kernels of layers that carry a state from token to token (hybrid models).

Open ``gpu_convolutions.py`` first, then ``state_places.py``, which says how texts are cut into chunks. A kernel reads
each state once, from where it lies, and writes the state after the step's tokens once, into other slots. Each token of
a sequence is computed in the same way, whatever the step has beside it, so a state has the same bits however its text
was cut. References in torch: ``kernels/torch/recurrences.py``.
"""
