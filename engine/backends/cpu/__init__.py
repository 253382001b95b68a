"""Runs a model on the kernels of ``kernels/cpu``, as the CPU backend.

Open ``cpu_model.py`` first. Kernels and their layouts are in ``kernels/cpu``; the choice of a backend is in
``engine/load_model.py``; the slots of adapters are in ``engine/adapters/cpu_adapters.py``.
"""
