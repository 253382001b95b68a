"""Pools that outlive the process of their KV node. Open surviving_memory.py first.

    surviving_memory.py  SurvivingMemory: a node's memory that finds, recovers or abandons its previous life's pool.
    surviving_pool.py    SurvivingPool: a pool whose memory outlives its node, and the proof that no process uses it.
    owned_segment.py     OwnedSegment: host memory with an owner, and the places of its users.
    slot_table.py        SlotTable: committed blocks in memory that outlives the node, readable after any kill.
    surviving_blocks.py  SurvivingBlocks: writes that table, and recovers the previous life's blocks (no I/O).
    survival.py          PoolSurvival: background work of recording and recovering blocks.
    keeper_client.py     PoolKeeper: a node's connection to the keeper.
    keeper_process.py    the keeper (``pillion keeper``), the process that holds a pool's descriptors meanwhile.
    keeper_messages.py   the JSON lines between node and keeper.

kvstore/ledger still decides who may use a block, and kvstore/memory creates the memory.
"""
