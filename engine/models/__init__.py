"""What a model computes, as data and plain functions over torch tensors.

    families.py       the table of model families: where a new family goes
    model_config.py   ``config.json`` -> ModelConfig, the options of the decoder; rope_config.py its rotary embeddings
    eagle_config.py   ``config.json`` of an EAGLE-3 head -> EagleConfig
    quantization.py   how a config says that matrices in few bits are stored;  quantization_methods.py: the table of
                      producers, of which compressed_tensors_config.py is one
    rank_split.py     what each rank of a worker computes under tensor parallelism
    config_json.py    checked values of a ``config.json``;  config_keys.py: refuses keys that nobody here obeys
    decoder.py        the forward pass of every family, and the weights that it reads
    layers.py         norms, activations, gated MLP, mixture of experts;  rope.py: rotary embedding

Read families.py first, then decoder.py. Never in here: files and tensor names (engine/checkpoints), and kernels of one
device (engine/backends). families, model_config, and what reads configs import no torch, because the gateway and the
supervisor read configs, too.
"""
