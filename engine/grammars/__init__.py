"""Grammars of answers: the allowed next tokens as a function of the answer's tokens so far.

Start with grammar_state.py. The gateway turns schemas, tools and reasoning into one grammar.
"""
