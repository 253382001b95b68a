"""Paged attention and linear layers on any processor, by torch's own kernels.

No kernels of our own belong here.
"""
