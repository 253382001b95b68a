"""Has the kernels of adapters."""
