"""Runs tensor parallelism on GPUs: ranks that have one each, or share one.

Open ``gpu_rank_loading.py`` first. ``engine/ranks`` has what ranks on CPUs and on GPUs have in common.
"""
