"""Runs pipeline parallelism on GPUs: stages of a prefill worker that have one each, or share one.

Open ``gpu_stage_loading.py`` first. ``engine/stages`` has what stages on CPUs and on GPUs have in common.
"""
