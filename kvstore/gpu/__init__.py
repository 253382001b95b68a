"""Pools in GPU memory, and GPU memory shared between processes; without torch.

    cuda_domain.py    CudaDomain: the memory of one GPU or several. Start here.
    cuda_driver.py    CUDA's driver API through ctypes.
    cuda_segment.py   GPU memory that other processes map.
    cuda_memory.py    CudaMemory: a pool on one or several GPUs, copied through pinned host memory.
    mapped_memory.py  a worker's mappings: of the pool, and of regions (share_region).
    regions.py        memory outside the pool that workers share, such as weights. Sans-IO.
    region_server.py  region connections of the attach socket.

kvstore/ledger decides which process may use a slot; here a slot is an offset.
"""
