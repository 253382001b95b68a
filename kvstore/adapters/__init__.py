"""Brings the files of adapters to workers: out of this machine's model cache, or from another node's machine."""
