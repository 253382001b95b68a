"""Choice of tokens on the CPU: a pure function of (logits, history, seed, position) (I6).

    sampler.py         the stages of a row of logits, from its bias and penalties to the chosen token
    masks.py           what grammars and requests allow
    allowed_masks.py   the tokens that a request allows, beside its grammar
    logit_edits.py     what a stream's parameters change in its logits, compiled once
    cuts.py            top_k, top_p and min_p
    gumbel.py          the noise, and its random numbers
    logprobs.py        log probabilities of chosen and most likely tokens
    scores.py          log probabilities of a prompt's tokens

Read sampler.py first. kernels/gpu/sampling does all this on a GPU. Requests, sequences and stop strings (which the
gateway finds) are not handled here.
"""
