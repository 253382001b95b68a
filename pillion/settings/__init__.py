"""Flags whose values have their own syntax, and limits of KV nodes that no flag sets.

    served_models.py        --also-model: further models of a gateway
    sampling_defaults.py    --generation-config and --override-generation-config
    speculative_config.py   --speculative-config: how a decode worker drafts tokens
    node_limits.py          limits of KV nodes that no flag sets

`pillion/config.py` declares all flags; its dataclasses contain the parsed values.
"""
