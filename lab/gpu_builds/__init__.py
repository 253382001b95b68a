"""Builds the GPU's kernels on a machine without one: ``python -m lab.gpu_builds``.

`specs` lists the uses of kernels that are built, with their limits. `cache` fills Triton's cache for another machine.
"""
