"""Lets a pool and its blocks outlive the process of their KV node. Open surviving_memory.py first.

    surviving_memory.py  SurvivingMemory: a node's memory that finds, recovers or leaves what its last life had.
    surviving_pool.py    SurvivingPool: a pool whose memory outlives its node, and the proof of its disuse.
    owned_segment.py     OwnedSegment: host memory with an owner, and the places of those who use it.
    slot_table.py        SlotTable: committed blocks in memory that outlives the node, readable after any kill.
    surviving_blocks.py  SurvivingBlocks: writes that table, and recovers what an earlier life left (no I/O).
    survival.py          PoolSurvival: what a node does for its next life, and with what its last one left.
    keeper_client.py     PoolKeeper: a node's side of the process that holds a pool's descriptors meanwhile.
    keeper_process.py    the keeper (``pillion keeper``), which is that process.
    keeper_messages.py   the JSON lines between node and keeper.

kvstore/ledger still decides what a block is and who may use it, and kvstore/memory makes the memory.
"""
