"""Has the kernels of layers that carry a state from token to token (hybrid models).

    pieces.py        the sizes of a state's pieces
    state_pages.py   where a kernel finds a sequence's state in slots of the pool
    convolutions.py  convolutions over the last tokens of a sequence
    delta_rule.py    the gated delta rule;  state_spaces.py: Mamba-2
    gates.py         gates and norms of what these, and attention beside them, have found

Open ``convolutions.py`` first. A kernel reads each state once, from where it lies, and writes the state after the
step's tokens once, into other slots. Each token of a sequence is computed in the same way, whatever the step has beside
it, so a state has the same bits however its text was cut. References in torch: ``kernels/torch/recurrences.py``.
"""
