"""Reads the flags whose values have a form of their own. All other flags are declared and read in `pillion/config.py`.

    served_models.py        --also-model: the further models of a gateway
    sampling_defaults.py    --generation-config and --override-generation-config
    speculative_config.py   --speculative-config: how a decode worker drafts tokens

`pillion/config.py` declares these flags, and its dataclasses hold what is read here.
"""
