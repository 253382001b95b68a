"""Follows grammars of answers: which tokens may come next, as a function of the answer's tokens so far.

    answer_grammar.py    what a scheduler and a sampler know of a grammar: two protocols, without any library
    grammar_state.py     one answer's place in its grammar: its tokens, forced tokens, masks, its end
    compiled_grammar.py  a grammar that is compiled, and what a matcher, a place in it, can do
    mask_threads.py      computes masks beside the steps; a late one holds nobody up
    step_masks.py        the masks of a step's rows
    grammar_feature.py   a grammar's part in a worker and its steps, which is where the room meets the core
    compiler.py          the only module that imports llguidance: its tokenizer, and a cache of compiled grammars

Read grammar_state.py first. Schemas, tools and reasoning stay out of here: the gateway turns them into one grammar.
"""
