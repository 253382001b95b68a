"""Check for unsupported flags of hybrid models, some of whose layers have a recurrent state. States of running
sequences are managed by engine/scheduling/states.py."""
