"""Backends: what runs a step's batch over the KV pool.

    backend.py         the interface: Backend, InFlightStep, KVLayout, and checks that all backends share
    batch.py           StepBatch, a step as arrays;  batching.py makes it of a scheduler's plan
    step_masks.py      the masks of a step's rows, as grammars compute them
    loading.py         chooses and loads a worker's backend;  devices.py resolves "--device auto"
    draft_model.py     the passes of a draft model over its model's pool;  draft_loading.py loads one
    eagle_head.py      the passes of an EAGLE-3 head, which reads states of its model, and the head on torch
    accuracy.py        what quantized weights cost in accuracy
    host_backend.py    what backends on the calling thread have in common
    plain_adapters.py  how backends take adapters that were read in the plain form
    torch_backend.py   plain torch on the CPU: the smallest backend
    cpu/               the backend of the CPU kernels (kernels/cpu)
    gpu/               the backend of the Triton kernels (kernels/gpu)

Read backend.py first, then torch_backend.py. Never in here: decisions about which sequence runs (engine/scheduling),
and kernels.
"""
