"""Keeps the last, partial blocks of answers at the worker that wrote them, for the next turns of their conversations.

- `partial_blocks` is the feature: which blocks a worker keeps, and who begins with a copy of one.
"""
