"""Transfer of adapter files to workers, from this machine's model cache or another node's machine."""
