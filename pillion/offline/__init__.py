"""Runs the whole engine in the caller's process, as :class:`pillion.LLM`.

No behaviour of the service comes in here: the components are the ones that `pillion serve` runs.

Open llm.py first.
"""
