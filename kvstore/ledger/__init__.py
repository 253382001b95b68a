"""The slot ledger: who owns which slot of a pool, which blocks are committed, pinned and evicted, who waits for memory.

    ledger.py         Ledger: slots, holders, tickets, commits. Read its module docstring first.
    tree.py           BlockTree: committed blocks by hash and parent, protected by pins on tails.
    eviction.py       EvictionPolicy and its implementations LRU and LFU: which block leaves first.
    retentions.py     Retentions: chains that are evicted last, for a while and within quotas; users call them pins.
    waiting_queue.py  WaitingQueue: OpenTicket calls that wait for memory.
    slot_table.py     SlotTable: committed blocks in memory that outlives the node's process, torn writes noticed.
    block_log.py      BlockLog, FollowerStream: the newest changes by number, and what a follower is sent of them.
    kept_blocks.py    KeptBlocks: writes that table, and takes over what an earlier life of the node has left in it.
    integrity.py      check_integrity: the proof that everything adds up (I4).
    records.py        Block, Holder, TicketState, Retention, IndexEvent, PoolShape: plain data.

Everything here is sans-IO (I9): no clock, no socket, no asyncio. It knows slots as numbers and never touches memory.
"""
