"""Has the kernels of ranks, the processes that share a model.

rank_sums.py    sums over ranks, and the waits for them
"""
