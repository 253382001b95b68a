"""Decodes speculatively, by draft tokens, which a step's own logits judge.

    worker_drafts.py   what a worker drafts tokens with;  the draft tokens of a step: engine/scheduling/draft_tokens.py
    draft_control.py   how many tokens are drafted for each stream;  acceptance.py: how often drafts are right
    lookup_drafters.py drafts from the text itself, and from earlier answers, which recent_answers.py keeps
    draft_chains.py    a draft model's KV: its slots, what it catches up with, its draft tokens
    draft_model.py     the passes of a draft model over its model's pool;  draft_loading.py loads one
    eagle_chains.py    the KV of an EAGLE-3 head, and the states that it reads
    eagle_head.py      the passes of an EAGLE-3 head, and the head on torch;  cpu_eagle.py: the head on the CPU kernels
    gpu_eagle.py       the head on the GPU kernels
    eagle_config.py    ``config.json`` of an EAGLE-3 head;  eagle_weights.py: its tensors

Read engine/scheduling/draft_tokens.py first. Tokens that are certain (engine/grammars), and the judging of proposed
tokens (engine/scheduling), stay out of here.
"""
