"""Runs tensor parallelism inside of a worker: several ranks, each a process with a share of the model.

    rank_loading.py    chooses and loads each rank's share: what the core asks for
    rank_collective.py    the sums and waits of a rank's program on the CPU kernels
    cpu_rank.py        the backend of a rank on the CPU kernels
    rank_processes.py  the other ranks, seen by rank 0: started, called together, watched and ended
    ranked_backend.py  rank 0's backend: every call goes to all ranks
    rank_main.py       the process of a rank above 0
    rank_messages.py   what ranks tell each other
    rank_weights.py    cuts a loaded layer into a rank's share of it
    rank_memory.py     the memory in which ranks of one host exchange partial sums and logits, and RankMember

The waits and sums are kernels (``kernels/cpu/ranks/rank_sums.py``); ranks on GPUs are in ``engine/gpu_ranks``. Open
``rank_processes.py`` first, which draws a worker's life, and ``engine/models/model_shard.py`` for what a rank has.
"""
