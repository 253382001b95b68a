"""Kernels of adapters."""
