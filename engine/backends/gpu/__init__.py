"""The backend of the Triton kernels, whose steps run ahead of the host.

    gpu_backend.py     the Backend: launches steps and checks their limits
    gpu_devices.py     GPUs of this machine and their assignment to processes
    gpu_loading.py     loads a backend with weights and workspace, before the pool is allocated
    gpu_worker.py      a worker of one process, with weights in memory shared by the KV node
    gpu_roofline.py    estimated cost of a step, and the token budget derived from it
    gpu_decoder.py     the forward pass over fused kernels and fixed buffers
    gpu_model.py       a model's weights, rotary tables and buffers
    gpu_experts.py     mixtures of experts: buffers and order of kernels
    shared_experts.py  fuses shared experts into mixtures
    gpu_weights.py     weights in memory that all workers of a GPU map
    gpu_step.py        a step's arrays as one record on the device
    pool_parts.py      a process's KV heads in a pool, which may be divided over GPUs
    gpu_graphs.py      CUDA graphs of whole steps
    gpu_sampler.py     sampling on the device, and the copy of tokens to the host
    device_memory.py   mapped GPU memory as a torch tensor

Read gpu_backend.py first. The Triton code is in kernels/gpu.
"""
