"""The pool's bytes, on the host or on a GPU, without torch.

    memory.py        PoolMemory: the contract; HostMemory; block checksums. Start here.
    domain.py        Domain: this host's memory or some GPUs'; its size and its segments.
    node_memory.py   NodeMemory: a node's pool and shared regions out of its domain.
    segment.py       host memory that other processes map: an anonymous file.
    kept_pool.py     KeptPool: a pool whose memory outlives its node, and the proof that nobody uses it any more.
    keeper.py        PoolKeeper: a node's side of the process that holds a pool's descriptors meanwhile.
    keeper_process.py  that process.
    cuda_segment.py  a GPU's memory that other processes map.
    cuda_memory.py   CudaMemory: a pool on one or several GPUs, copied through pinned host memory.
    cuda_copies.py   CudaCopies: a stream of copies between blocks and their slots.
    shards.py        Shards: how the blocks of a pool are divided over several GPUs.
    cuda_driver.py   CUDA's driver API by ctypes.

Which slot holds what, and who may use it, is decided in kvstore/ledger; here a slot is a place.
"""
