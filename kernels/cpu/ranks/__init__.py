"""Kernels of ranks, the processes that share a model."""
