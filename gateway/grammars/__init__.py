"""Writes the structure that an answer must have as one grammar. Open answer_grammar.py first.

answer_grammar.py      joins the pieces of an answer into one text of llguidance's grammars (no I/O)
structured_outputs.py  the pieces that clients ask for: a JSON schema, a regular expression, choices... (no I/O)
tool_pieces.py         the pieces of reasoning and of calls of tools (no I/O)
literal_values.py      the rules of arguments in Python's notation and in Gemma's (no I/O)
spelled_lark.py        a grammar in Lark, for its texts as JSON spells them (no I/O)
json_schema.py         what of JSON Schema an answer can be held to (no I/O)
schema_dialects.py     schemas of other drafts and dialects, written as that one reads them (no I/O)
schema_places.py       where schemas stand within a schema, and where its references lead (no I/O)
json_strings.py        which strings its patterns and formats mean (no I/O)
structural_tags.py     structural tags: structures amid free text (no I/O)
grammar_checker.py     compiles grammars before a worker gets them, in a process that can be killed
grammar_worker.py      what that process does; it imports nothing of Pillion
request_grammars.py    the grammar of one request, built and checked, for the gateway

A worker gets the text and follows it; it knows no schema.
"""
