"""Runs a model on the kernels of ``kernels/cpu``, as the CPU backend.

    cpu_backend.py    the backend: checks a batch, fills the step's record, runs the program on the thread pool
    cpu_model.py      a model as a program: which kernels run over which buffers
    cpu_layer.py      the kernels of a layer, for each operation of its description;  cpu_operations.py builds them
    cpu_states.py     the kernels of layers with a state
    cpu_weights.py    weights packed once, in one file that all workers map

Open ``cpu_model.py`` first. Kernels and their layouts are in ``kernels/cpu``; the choice of a backend is in
``engine/backends/loading.py``; the slots of adapters are in ``engine/adapters/cpu_adapters.py``.
"""
