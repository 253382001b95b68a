"""Computes paged attention and linear layers on any processor, by torch's own kernels.

Never in here: kernels of our own.
"""
