"""Computes paged attention and linear layers on any processor, by torch's own kernels.

    reference.py         paged attention one sequence and one head at a time: the oracle of every attention kernel
    torch_attention.py   a step's attention;  attention_tiles.py plans which queries meet which keys in which call
    quantized_matrix.py  a matrix in few bits, in the plain form that all packers of kernels take
    torch_linear.py      linear layers whose bfloat16 weights are packed where the processor can
    recurrences.py       layers with a state, token by token;  step_states.py: a step's states, out of slots and back

Read reference.py first. Never in here: kernels of our own.
"""
