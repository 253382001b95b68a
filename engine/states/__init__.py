"""Unsupported combinations of flags for hybrid models, whose layers carry a state from token to token. States of
running sequences are managed by engine/scheduling/states.py."""
