"""The whole engine in the caller's process, as :class:`pillion.LLM`, with the components of `pillion serve`.

Open llm.py first.
"""
