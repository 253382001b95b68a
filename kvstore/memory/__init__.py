"""Holds the pool's bytes on the host, without torch.

    memory.py        PoolMemory: the contract; HostMemory; block checksums. Start here.
    domain.py        Domain: what a pool is made of; HostDomain; a seam for devices.
    node_memory.py   NodeMemory: a node's pool and shared regions out of its domain.
    segment.py       host memory that other processes map: an anonymous file.
    head_shares.py   shares_of: KV heads for ranks, and for the shards of a pool.

kvstore/ledger decides which slot holds what, and who may use it; here a slot is a place.
"""
