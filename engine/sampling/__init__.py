"""Choice of tokens on the CPU: a pure function of (logits, history, seed, position) (I6).

    sampler.py         rows of logits to tokens: bias, penalties, temperature, filters and noise
    masks.py           masks of allowed tokens, applied to logits or to candidates
    allowed_masks.py   masks of allowed_token_ids, combined with those of grammars
    logit_edits.py     bias, penalties and banned tokens of a stream, compiled once
    cuts.py            top_k, top_p and min_p
    gumbel.py          Gumbel noise from counter-based random numbers
    logprobs.py        log probabilities of chosen and most likely tokens
    scores.py          log probabilities of a prompt's tokens

Read sampler.py first. kernels/gpu/sampling has the GPU's counterparts. Stop strings are matched by the gateway.
"""
