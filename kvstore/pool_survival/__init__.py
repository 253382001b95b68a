"""Pools that outlive the process of their KV node. Open surviving_memory.py first.

    surviving_memory.py  SurvivingMemory: memory of a node that recovers or abandons the pool of its previous process.
    surviving_pool.py    SurvivingPool: a pool whose memory outlives its node, and the proof that no process uses it.
    owned_segment.py     OwnedSegment: host memory with an owner and users, each of which has a byte of its file locked.
    slot_table.py        SlotTable: committed blocks in memory that outlives the node, readable after any kill.
    surviving_blocks.py  SurvivingBlocks: writes that table, and recovers blocks from it (no I/O).
    survival.py          PoolSurvival: background work of recording and recovering blocks.
    keeper_client.py     PoolKeeper: a node's connection to the keeper.
    keeper_process.py    the keeper (``pillion keeper``), a process that holds a pool's descriptors while no node runs.
    keeper_messages.py   the JSON lines between node and keeper.

kvstore/ledger still decides which process may use a block, and kvstore/memory creates the memory.
"""
