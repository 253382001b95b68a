"""Has the kernels: arithmetic over tensors and arrays, without requests, sequences or files of models.

    torch/   paged attention and linear layers by torch's own CPU kernels
    cpu/     a compiler for CPU kernels (AVX2, AVX-512, AMX, NEON) and the kernels written with it
    gpu/     Triton kernels for NVIDIA GPUs
    gpu_states/  those of layers that carry a state from token to token
    step.py  one step as arrays: its tokens, the parameters of sampled rows, and the chosen tokens
    state_pieces.py  how layers with states cut them into pieces, for all kernels
    kv_codes.py  what all of them agree on where keys and values have 8 bits

Read lab/testbed/attention_reference.py first, which shows in a few lines what paged attention computes. Kernels know no
more of the engine than the arrays they get: they never import ``pillion.engine``.
"""
