"""Has the kernels of ranks, the processes that share a model."""
