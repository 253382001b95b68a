"""Speculative decoding: draft tokens, verified by a step's own logits.

    worker_drafts.py   a worker's drafter;  the draft tokens of a step: engine/scheduling/draft_tokens.py
    draft_control.py   number of draft tokens per stream;  acceptance.py: acceptance rates
    lookup_drafters.py drafts from the text itself, and from earlier answers, which recent_answers.py caches
    draft_chains.py    a draft model's KV chains: their slots, the tokens still to compute, their draft tokens
    draft_model.py     passes of a draft model over its model's pool;  draft_loading.py loads one
    eagle_chains.py    KV of an EAGLE-3 head, and the hidden states that it reads
    eagle_head.py      passes of an EAGLE-3 head, and the head on torch;  cpu_eagle.py: the head on the CPU kernels
    gpu_eagle.py       the head on the GPU kernels
    eagle_config.py    ``config.json`` of an EAGLE-3 head;  eagle_weights.py: its tensors

Start with engine/scheduling/draft_tokens.py. Forced tokens of grammars are in engine/grammars, the verification of
draft tokens in engine/scheduling.
"""
