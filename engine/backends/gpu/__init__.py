"""Is the backend of the Triton kernels, whose steps run ahead of the host.

    gpu_backend.py     implements Backend: launches steps and checks their limits
    gpu_devices.py     GPUs of this machine, and what flags say of them
    gpu_loading.py     a worker's flags -> a backend with weights and workspace, before the pool is made
    gpu_worker.py      a worker of one process, whose weights lie in memory of the KV node's
    gpu_roofline.py    what a step costs by the device's rates, before any was measured, and the budget that suits it
    gpu_decoder.py     the forward pass over fused kernels and fixed buffers
    gpu_model.py       a model's weights, rotary tables and buffers
    gpu_experts.py     mixtures of experts: their buffers, and the kernels' order
    shared_experts.py  joins them with the MLP beside them
    gpu_weights.py     weights in memory that all workers of a GPU map
    gpu_step.py        a step's arrays as one record on the device
    pool_parts.py      where a process's KV heads lie in a pool, also in one that is divided over GPUs
    gpu_graphs.py      CUDA graphs of whole steps
    gpu_sampler.py     chooses tokens on the device, and fetches them
    device_memory.py   mapped GPU memory as a torch tensor

Read gpu_backend.py first. Triton code is not in here but in kernels/gpu.
"""
