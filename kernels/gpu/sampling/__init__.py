"""Chooses tokens on the device, with the same results as engine/sampling.

    gpu_sampling.py      ``choose``: draws each row's token
    sampling_cuts.py     top_k, top_p and min_p
    sampling_masks.py    tokens that a grammar forbids
    sampling_edits.py    bias, penalties and banned ids
    sampling_record.py   a step's parameters as arrays of int32
    sampling_device.py   groups and slices of a vocabulary, scratch memory, shared device functions
    gpu_philox.py        random numbers

Read gpu_sampling.py first.
"""
