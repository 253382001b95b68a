"""Builds of the GPU kernels on a machine without a GPU: ``python -m lab.gpu_builds``.

`specs` lists the built uses of kernels with their limits. `cache` fills Triton's cache for another machine.
"""
