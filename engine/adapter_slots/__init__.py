"""Keeps adapters in a worker: which ones are ready, in which of the backend's slots, and how they come there.

Read adapter_slots.py first. What an adapter's files say (engine/adapters), and how a backend multiplies by them
(engine/backends), stays out of here.
"""
