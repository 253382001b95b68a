"""Kernels that work row by row: each token's row is independent of the others.

Read gated.py first.
"""
