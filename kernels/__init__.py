"""Kernels: arithmetic over tensors and arrays, without requests, sequences or model files.

    torch/   paged attention and linear layers by torch's own CPU kernels
    cpu/     a compiler for CPU kernels (AVX2, AVX-512, AMX, NEON) and the kernels written with it
    gpu/     Triton kernels for NVIDIA GPUs
    gpu_states/  Triton kernels of recurrent layers
    step.py  one step as arrays: its tokens, the parameters of sampled rows, and the chosen tokens
    state_pieces.py  sizes of the pieces that recurrent states are stored in
    kv_codes.py  constants of 8-bit keys and values

Read lab/testbed/attention_reference.py first, which shows in a few lines what paged attention computes. Kernels never
import ``pillion.engine``, which passes them arrays only.
"""
