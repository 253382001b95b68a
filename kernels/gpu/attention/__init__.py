"""Computes paged attention on a GPU.

Read paged_attention.py first.
"""
