"""Kernels: arithmetic over tensors and arrays, without requests, sequences or model files.

    torch/   paged attention and linear layers by torch's own CPU kernels
    cpu/     a compiler for CPU kernels (AVX2, AVX-512, AMX, NEON) and the kernels written with it
    gpu/     Triton kernels for NVIDIA GPUs
    gpu_states/  those of layers that carry a state from token to token
    step.py  one step as arrays: its tokens, the parameters of sampled rows, and the chosen tokens
    state_pieces.py  layout of the pieces of states, for all kernels
    kv_codes.py  constants of 8-bit keys and values

Read lab/testbed/attention_reference.py first, which shows in a few lines what paged attention computes. Kernels never
import ``pillion.engine``: the arrays are all that they get of it.
"""
