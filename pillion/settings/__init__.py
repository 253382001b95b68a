"""Parses the flags whose values have their own syntax. All other flags are declared and parsed in `pillion/config.py`.

    served_models.py        --also-model: further models of a gateway
    sampling_defaults.py    --generation-config and --override-generation-config
    speculative_config.py   --speculative-config: how a decode worker drafts tokens

`pillion/config.py` declares these flags, and its dataclasses hold the parsed values.
"""
