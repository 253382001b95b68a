"""Map of the CPU backend, which runs a model on the kernels of ``kernels/cpu``.

    cpu_backend.py    the backend: checks a batch, fills the step's record, runs the program on the thread pool
    cpu_model.py      a model as a program: which kernels run over which buffers
    cpu_weights.py    weights packed once, in one file that all workers map
    cpu_eagle.py      an EAGLE-3 head as a program, and its backend
    cpu_adapters.py   adapters in their places, and a step's rows that have one
    cpu_adapter_form.py  packs adapters for the kernels, in a process without torch

Open ``cpu_model.py`` first. Kernels and their layouts are in ``kernels/cpu``; the choice of a backend is in
``engine/backends/loading.py``.
"""
