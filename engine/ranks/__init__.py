"""Tensor parallelism within a worker: several ranks, each a process with a shard of the model.

    rank_loading.py    loading of a worker of several ranks, and of each rank's shard
    rank_collective.py all-reduces and barriers of a rank's program on the CPU kernels
    cpu_rank.py        backend of a rank on the CPU kernels
    rank_processes.py  rank 0's management of the other ranks: start, joint calls, supervision and end
    ranked_backend.py  rank 0's backend: every call goes to all ranks
    rank_main.py       process of a rank above 0
    rank_messages.py   messages between ranks
    rank_weights.py    cuts a rank's shard out of a loaded layer
    rank_memory.py     memory in which ranks of one host exchange partial sums and logits, and RankMember

The waits and sums are kernels (``kernels/cpu/ranks/rank_sums.py``); ranks on GPUs are in ``engine/gpu_ranks``. Start
with ``rank_processes.py``, which shows a worker's life cycle, and ``engine/models/model_shard.py`` for a rank's shard.
"""
