"""Holds the states of running sequences, for models whose layers carry one from token to token (hybrid models).

- `states` is the feature: which slots a step reads a sequence's state from, and which it writes.
- `state_places` decides where in a prompt states are kept.
- `states_check` says what such models cannot be served with yet.
"""
