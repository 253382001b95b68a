"""Holds the states of running sequences, for models whose layers carry one from token to token (hybrid models)."""
