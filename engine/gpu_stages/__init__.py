"""Runs pipeline parallelism on GPUs: stages of a prefill worker that have one each, or share one.

    gpu_stage_loading.py  starts and loads the stages
    gpu_stage_backend.py  a stage's forward pass: it begins with the rows of the stage before, and ends with its own
    gpu_stage_link.py     passes these rows from device to device

Open ``gpu_stage_loading.py`` first. ``engine/stages`` has what stages on CPUs and on GPUs have in common.
"""
