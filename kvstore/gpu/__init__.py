"""Holds the pool's bytes on GPUs, without torch, and memory of GPUs that processes share.

    cuda_domain.py    CudaDomain: the memory of one GPU or several. Start here.
    cuda_driver.py    CUDA's driver API by ctypes.
    cuda_segment.py   a GPU's memory that other processes map.
    cuda_memory.py    CudaMemory: a pool on one or several GPUs, copied through pinned host memory.
    mapped_memory.py  what a worker maps: the pool, and regions (share_region).
    regions.py        memory beside the pool that workers share, such as weights. Sans-IO.
    region_server.py  the attach socket's connections that want a region.

kvstore/ledger decides which slot holds what, and who may use it; here a slot is a place.
"""
