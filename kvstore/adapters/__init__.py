"""Brings the files of adapters to workers: out of this machine's model cache, or from another node's machine.

node_adapters.py   answers workers and gateways who ask a node for adapters, or bring some
adapter_pieces.py  an adapter's files as a stream of pieces, from machine to machine
"""
