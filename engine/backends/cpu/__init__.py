"""The CPU backend, which runs a model on the kernels of ``kernels/cpu``.

Open ``cpu_model.py`` first. Kernels and their layouts are in ``kernels/cpu``; ``engine/load_model.py`` chooses the
backend; the adapter slots are in ``engine/adapters/cpu_adapters.py``.
"""
