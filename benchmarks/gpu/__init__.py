"""Everything that is measured on a GPU, by one command: ``python -m benchmarks.gpu`` (``make bench-gpu``).

Sections run one after the other, each in a process of its own and within a named time, and every figure stands beside
a limit that was measured in the same process: the device's copy bandwidth, or its rate of matrix products.
"""
