"""Map of tensor parallelism inside of a worker: several ranks, each a process with a share of the model.

    rank_weights.py    cuts a loaded layer, or an adapter, into a rank's share of it
    rank_memory.py     the memory in which ranks of one host exchange partial sums and logits, and RankMember

What each rank computes is in ``engine/models/rank_split.py``; the waits and sums are kernels
(``kernels/cpu/rows/rank_sums.py``). Open ``rank_weights.py`` first.
"""
