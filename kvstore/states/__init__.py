"""Decides which states stay in a pool, for models whose layers carry one from token to token (hybrid models).

- `state_eviction` evicts the state that saves the least where states have more than their share of the pool.
"""
