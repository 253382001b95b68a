"""Keeps adapters in a worker: which ones are ready, in which of the backend's slots, and how they come there.

    adapter_feature.py  adapters in a worker and its steps, which is where the room meets the core
    adapter_slots.py    adapters that are ready or loading, and who may run with them; sans-IO
    adapter_loader.py   brings adapters' files to the machine, and has them read and packed

Read adapter_slots.py first. What an adapter's files say (engine/adapters), and how a backend multiplies by them
(engine/backends), stays out of here.
"""
