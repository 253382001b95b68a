"""Backends, which run a step's batch over the KV pool.

    backend.py         the interface: Backend, InFlightStep, KVLayout; and checks common to all backends
    batching.py        builds a step's arrays and sampling parameters from the scheduler's plan
    loaded_model.py    a loaded model with its backend
    devices.py         resolves "auto" in the device flags
    step_memory.py     max memory of a step
    host_backend.py    base class of backends that run on the calling thread
    torch_backend.py   plain torch on the CPU: the simplest backend
    cpu/               the backend of the CPU kernels (kernels/cpu)
    gpu/               the backend of the Triton kernels (kernels/gpu)

Read backend.py first, then torch_backend.py. engine/scheduling chooses the sequences of a step; engine/load_model.py
chooses the backend.
"""
