"""Follows grammars of answers: which tokens may come next, as a function of the answer's tokens so far.

Read grammar_state.py first. Schemas, tools and reasoning stay out of here: the gateway turns them into one grammar.
"""
