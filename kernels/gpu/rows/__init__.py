"""Has kernels that work row by row: each token's row is independent of the others.

    embedding.py   rows of the embedding, also for tokens that only the device knows
    norms.py       RMS norms, alone or fused with the sum of the residual stream
    gated.py       the activation of a gated MLP

Read gated.py first.
"""
