"""Kernels over single rows.

Open ``rows.py`` first. The kernels' references in torch are in ``tests/support/cpu_references.py``; matrix
products are in ``products``.
"""
