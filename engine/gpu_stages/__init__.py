"""Pipeline parallelism on GPUs: stages of a prefill worker, with a GPU each or one shared GPU.

Start with ``gpu_stage_loading.py``. The part common to CPUs and GPUs is in ``engine/stages``.
"""
