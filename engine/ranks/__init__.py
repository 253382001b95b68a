"""Map of tensor parallelism inside of a worker: several ranks, each a process with a share of the model.

    rank_processes.py  the other ranks, seen by rank 0: started, called together, watched and ended
    ranked_backend.py  rank 0's backend: every call goes to all ranks
    rank_main.py       the process of a rank above 0
    rank_messages.py   what ranks tell each other
    rank_weights.py    cuts a loaded layer, or an adapter, into a rank's share of it
    rank_memory.py     the memory in which ranks of one host exchange partial sums and logits, and RankMember

What each rank computes is in ``engine/models/rank_split.py``; the waits and sums are kernels
(``kernels/cpu/rows/rank_sums.py``). Open ``rank_processes.py`` first, which draws a worker's life, and
``rank_weights.py`` for what a rank has.
"""
