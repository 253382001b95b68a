"""The backend of the Triton kernels, whose steps run ahead of the host.

    gpu_backend.py     implements Backend: launches steps and checks their limits
    gpu_loading.py     a worker's flags -> a backend with weights and workspace, before the pool is made
    gpu_model.py       the forward pass over fused kernels and fixed buffers
    gpu_weights.py     weights in memory that all workers of a GPU map
    gpu_adapters.py    places for adapters in fixed memory, and a step's rows that have one
    gpu_step.py        a step's arrays as one record on the device
    pool_parts.py      where a process's KV heads lie in a pool, also in one that is divided over GPUs
    gpu_graphs.py      CUDA graphs of whole steps
    rank_group.py      sums, gathers and broadcasts among the ranks of a worker
    rank_logits.py     the logits of all ranks' tokens, at rank 0
    gpu_sampler.py     chooses tokens on the device, and fetches them
    device_memory.py   mapped GPU memory as a torch tensor

Read gpu_backend.py first. Never in here: Triton code, which is in kernels/gpu.
"""
