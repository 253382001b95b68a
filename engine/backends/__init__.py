"""Runs a step's batch over the KV pool, by one of several backends.

    backend.py         the interface: StepBatch, Backend, InFlightStep, KVLayout, and checks that all backends share
    batching.py        makes a step's arrays and parameters of a scheduler's plan
    loaded_model.py    what loading a model gives a worker
    devices.py         resolves "auto" in the flags about devices
    step_memory.py     what the largest step takes of memory, and whether there is enough
    host_backend.py    what backends on the calling thread have in common
    torch_backend.py   plain torch on the CPU: the smallest backend
    cpu/               the backend of the CPU kernels (kernels/cpu)
    gpu/               the backend of the Triton kernels (kernels/gpu)

Read backend.py first, then torch_backend.py. Decisions about which sequence runs (engine/scheduling), and kernels, stay
out of here; which backend runs a model is chosen in engine/load_model.py.
"""
