"""Map of the LoRA adapters: small matrices that change a model's linear layers for the requests that name them.

    adapter_config.py    what an ``adapter_config.json`` of PEFT says; refuses what cannot be served
    pattern_cost.py      how long an expression of such a config may search
    adapter_files.py     an adapter's folder: its tensors, checked against the model, and its digest
    adapter_store.py     copies of adapters' folders by their digests, in the model cache
    adapter_weights.py   an adapter's matrices, laid over the fused linear layers of the decoder
    adapter_reader.py    reads the matrices of a folder
    adapter_forms.py     matrices as bits, on their way from the process that reads them to the worker
    adapter_process.py   a process that reads adapters for a worker or a gateway
    adapter_process_main.py  that process's program
    step_adapters.py     multiplies by them in plain torch, the reference for all kernels

Open ``adapter_weights.py`` first. What multiplies by them fast is in ``kernels``. The config, the files and the store
import no torch, because gateways check and keep adapters, too.
"""
