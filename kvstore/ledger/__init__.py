"""Keeps the slot ledger: who owns which slot of a pool, which blocks are committed, pinned, evicted, who waits.

    ledger.py         Ledger: slots, holders, tickets, commits. Read its module docstring first.
    tree.py           BlockTree: committed blocks by hash and parent, protected by pins on the last blocks of chains.
    eviction.py       EvictionPolicy and its implementations LRU and LFU: which block leaves first.
    waiting_queue.py  WaitingQueue: OpenTicket calls that wait for memory.
    integrity.py      check_integrity: the proof that everything adds up (I4).
    ledger_pins.py    LedgerPins: what a ledger tells of its blocks; a seam for chains that leave last.
    ledger_states.py  LedgerStates: what a ledger tells of the pages of states; a seam for which of them stay.
    records.py        Block, Holder, TicketState, IndexEvent, PoolShape: plain data.

Everything here is sans-IO (I9): no clock, no socket, no asyncio. It knows slots as numbers and never touches memory.
"""
