"""Model definitions, as data and plain functions over torch tensors.

    family_rows.py       a row of data per model family: where a new family goes
    model_family.py      fields of a row;  families.py: all rows with transformers' defaults
    layer_operations.py  vocabulary for describing a layer;  llama_layer.py: the layer of most families
    latent_layer.py      multi-head latent attention (MLA);  gemma4_layer.py and mimo_layer.py: layers of families
    linear_layer.py      layers with a state (hybrid models);  layer_states.py: the state
    state_layout.py      locations of a state's pieces in slots of the pool
    model_config.py      a model's config
    config_parser.py     ``config.json`` -> ModelConfig;  rope_config.py: rotary embeddings
    layer_config.py      per-layer config, in families whose layers differ
    linear_config.py     layers with states, and their shapes
    model_work.py        compute per token, and per query-key pair
    model_shard.py       a process's part of a model: all of it, or a rank's shard
    encoder_config.py    an encoder's config
    config_json.py       validated values of a ``config.json``;  config_keys.py: rejects unsupported keys
    decoder.py           forward pass of every family on torch, and its weights
    layer_weights.py     weights of a layer, by tensor name
    layers.py            norms, activations, mixture of experts;  rope.py: rotary embedding
    vector_head.py       logits of a classifier's labels, from the vector of a text

Start with family_rows.py, then layer_operations.py and decoder.py. Files are in engine/checkpoints, device kernels in
engine/backends. Families, layers and config readers import no torch, since the gateway and the supervisor read configs.
"""
