"""Runs the whole engine in the caller's process, as :class:`pillion.LLM`.

The components are the ones that `pillion serve` runs.

Open llm.py first.
"""
