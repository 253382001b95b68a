"""Says what models whose layers carry a state from token to token (hybrid models) cannot be served with yet. Where the
states of running sequences are is the scheduler's (engine/scheduling/states.py)."""
