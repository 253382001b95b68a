"""Describes what a model computes, as data and plain functions over torch tensors.

    families.py          the table of model families: where a new family goes
    layer_operations.py  the words in which a family describes a layer;  llama_layer.py: the layer of most families
    latent_layer.py      attention over latents (MLA);  gemma4_layer.py and mimo_layer.py: layers of families
    linear_layer.py      layers with a state (hybrid models);  layer_states.py: what such a state is
    state_layout.py      where slots of the pool have the pieces of a state
    model_config.py      what a config says of a model
    config_parser.py     ``config.json`` -> ModelConfig;  rope_config.py: its rotary embeddings
    layer_config.py      what a config says of single layers, in families whose layers differ
    linear_config.py     which layers have states, and their shapes
    model_work.py        how much it computes for a token, and for a query-key pair
    model_shard.py       what each process computes of a model: all of it, or the share of a rank
    encoder_config.py    what a config says of an encoder
    config_json.py       checked values of a ``config.json``;  config_keys.py: refuses keys that nobody here obeys
    decoder.py           the forward pass of every family on torch, and the weights that it reads
    layer_weights.py     the weights of a layer, by the names of its tensors
    layers.py            norms, activations, mixture of experts;  rope.py: rotary embedding
    vector_head.py       from the vector of a text to the logits of a classifier's labels

Read families.py first, then layer_operations.py and decoder.py. Files (engine/checkpoints) and kernels of one device
(engine/backends) stay out of here. Families, their layers and what reads configs import no torch, because the gateway
and the supervisor read configs, too.
"""
