"""Slot ledger of a pool: slot ownership, committed and pinned blocks, eviction, and the queue for memory.

    ledger.py         Ledger, Holder, TicketState: slots, leases, tickets, commits. Read its module docstring first.
    tree.py           BlockTree: committed blocks by hash and parent, protected by a pin on a chain's last block.
    eviction.py       EvictionPolicy and LRU: which block to evict first.
    waiting_queue.py  WaitingQueue: OpenTicket calls that wait for memory.
    integrity.py      check_integrity: consistency of slots, pins and reservations (I4).
    pin_table.py      PrefixPinTable: the prefix pins of a pool, their quotas, and their eviction order.
    state_eviction.py StateEviction: which blocks and states of a pool with states to evict first.
    records.py        Block, IndexEvent, PoolShape: plain data.

Everything here is sans-IO (I9): no clock, no socket, no asyncio. Slots are numbers; memory is never touched.

README.md has the lifecycles and the invariants.
"""
