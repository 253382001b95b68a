"""Attention and its friends over the paged pool: a pure-torch reference for each kernel, the oracle of all others."""
