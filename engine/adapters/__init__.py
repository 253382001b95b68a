"""Reads adapters: small matrices that change a model's linear layers for the requests that name them (LoRA).

    adapter_config.py       what an ``adapter_config.json`` of PEFT says; refuses what cannot be served
    adapter_targets.py      which linear layers adapters may change (--lora-target-modules)
    pattern_cost.py         how long an expression of such a config may search
    adapter_files.py        an adapter's folder: its tensors, checked against the model, and its digest
    adapter_store.py        copies of adapters' folders by their digests, in the model cache
    adapter_weights.py      an adapter's matrices, laid over the fused linear layers of the decoder
    adapter_reader.py       reads the matrices of a folder
    adapter_forms.py        matrices as bits, on their way from the process that reads them to the worker
    adapter_process.py      a process that reads adapters for a worker or a gateway
    adapter_process_main.py that process's program
    adapter_loader.py       brings adapters to a worker: their files to its machine, then what is packed of them
    adapter_rows.py         which layers they may change, and a step's rows that have one
    plain_adapters.py       slots of backends that take them as tensors
    step_adapters.py        multiplies by them in plain torch, for the torch backend: the reference for all kernels
    adapter_table.py        the table by which the CPU kernels find the adapters in their slots
    cpu_adapters.py         slots for the CPU kernels, and the program of steps that have some
    cpu_adapter_form.py     packs them for the CPU kernels, in a process without torch

Open ``adapter_weights.py`` first. Which adapters are ready in a worker, and who may run with them, is in
``engine/scheduling/adapter_slots.py``. The kernels are in ``kernels/cpu/adapters``, the slots on GPUs in
``engine/gpu_adapters``. The config, the files and the store import no torch, because gateways check and keep adapters,
too.
"""
