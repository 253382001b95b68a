"""Keeps the slot ledger: who owns which slot of a pool, which blocks are committed, pinned, evicted, who waits.

    ledger.py         Ledger, Holder, TicketState: slots, leases, tickets, commits. Read its module docstring first.
    tree.py           BlockTree: committed blocks by hash and parent, protected by pins on the last blocks of chains.
    eviction.py       EvictionPolicy, and LRU: which block leaves first.
    waiting_queue.py  WaitingQueue: OpenTicket calls that wait for memory.
    integrity.py      check_integrity: the proof that everything adds up (I4).
    pin_table.py      PrefixPinTable: the prefix pins of a pool and their quotas, and that they leave last.
    state_eviction.py StateEviction: which states of hybrid models stay.
    records.py        Block, IndexEvent, PoolShape: plain data.

Everything here is sans-IO (I9): no clock, no socket, no asyncio. It knows slots as numbers and never touches memory.
"""
