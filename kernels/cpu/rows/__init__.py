"""Has the kernels that treat rows one by one.

Open ``rows.py`` first. The kernels' references in torch are in ``tests/support/cpu_references.py``; matrix
products are in ``products``.
"""
