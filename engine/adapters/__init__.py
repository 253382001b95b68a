"""LoRA adapters: low-rank changes of a model's linear layers, for the requests that name one.

    adapter_config.py       PEFT's ``adapter_config.json``, and checks for unsupported options
    adapter_targets.py      linear layers that adapters may change (--lora-target-modules)
    pattern_cost.py         bound on the search time of a config's regular expression
    adapter_files.py        an adapter's folder: its tensors, checked against the model, and its digest
    adapter_store.py        copies of adapters by digest, in the model cache
    adapter_weights.py      an adapter's matrices, mapped to the decoder's fused linear layers
    adapter_reader.py       reads the matrices of a folder
    adapter_forms.py        serialization between the process that reads them and the worker
    adapter_process.py      subprocess that reads adapters for a worker or a gateway
    adapter_process_main.py that subprocess's program
    adapter_loader.py       a worker's loading: fetch the files, then pack them
    adapter_rows.py         layers that adapters may change, and a step's rows with an adapter
    plain_adapters.py       adapter slots of backends that use tensors
    step_adapters.py        plain torch implementation, the reference for all kernels
    adapter_table.py        slot table of the CPU kernels
    cpu_adapters.py         slots for the CPU kernels, and the program of steps with adapters
    cpu_adapter_form.py     packs adapters for the CPU kernels, in a process without torch

Start with ``adapter_weights.py``. ``engine/scheduling/adapter_slots.py`` tracks the adapters that are loaded in a
worker, and which sequences may run. The kernels are in ``kernels/cpu/adapters``, the slots on GPUs in
``engine/gpu_adapters``. The config, the files and the store import no torch, since gateways use them, too.
"""
