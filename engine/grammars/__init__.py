"""Grammars of answers: which tokens may come next after the answer's tokens so far.

Start with grammar_state.py. The gateway turns schemas, tools and reasoning into one grammar.
"""
