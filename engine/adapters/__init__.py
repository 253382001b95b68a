"""Map of the LoRA adapters: small matrices that change a model's linear layers for the requests that name them.

    adapter_weights.py   an adapter's matrices, laid over the fused linear layers of the decoder

Open ``adapter_weights.py`` first. What multiplies by them is in ``kernels``.
"""
