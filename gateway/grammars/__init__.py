"""Structured output: the grammar of an answer. Open answer_grammar.py first.

answer_grammar.py      joins the pieces of an answer into one llguidance grammar (sans-IO)
structured_outputs.py  pieces for a JSON schema, a regular expression, choices... (sans-IO)
tool_pieces.py         pieces for reasoning and tool calls (sans-IO)
literal_values.py      rules for arguments in Python's and in Gemma's notation (sans-IO)
spelled_lark.py        a Lark grammar for texts within JSON strings (sans-IO)
json_schema.py         the supported part of JSON Schema (sans-IO)
schema_dialects.py     conversion of other drafts and dialects (sans-IO)
schema_places.py       subschemas and references of a schema (sans-IO)
json_strings.py        strings that match patterns and formats (sans-IO)
structural_tags.py     structural tags: structures within free text (sans-IO)
grammar_checker.py     compiles grammars before a worker gets them, in a process that can be killed
grammar_worker.py      that process's program; it imports nothing of Pillion
request_grammars.py    builds and checks the grammar of one request

A worker gets only the grammar, no schema.
"""
