"""Runs tensor parallelism on GPUs: ranks that have one each, or share one.

    gpu_rank_loading.py  starts and loads the ranks
    rank_group.py        sums, gathers and broadcasts among them
    rank_logits.py       the logits of all ranks' tokens, at rank 0

Open ``gpu_rank_loading.py`` first. ``engine/ranks`` has what ranks on CPUs and on GPUs have in common.
"""
