"""Kernels that process each row by itself.

Open ``rows.py`` first. The kernels' references in torch are in ``tests/support/cpu_references.py``; matrix
products are in ``products``.
"""
