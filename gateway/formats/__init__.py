"""How models write their reasoning and their calls of tools, and how both are read. Open answer_reader.py first.

answer_reader.py     an answer's text, piece by piece, to reasoning, content and calls
answer_parts.py      what became certain of an answer, and the text that is still to be read
reasoning.py         the table of reasoning formats
tool_formats.py      the table of tool formats; a new one is a row there
json_calls.py        calls that are JSON objects: hermes, llama3_json, mistral
xml_calls.py         calls that are elements with a text for each parameter: qwen3_coder
model_formats.py     the formats of one model, chosen by flags or found in its chat template
tool_prompt.py       tools and calls as chat templates want them
client_json.py       JSON that clients send as text: counted, checked, parsed

Everything here is sans-IO: text goes in, parts come out, and neither a token nor a request is known.
"""
