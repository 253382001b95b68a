"""Parsers of reasoning and tool calls in models' own formats. Open answer_reader.py first.

answer_reader.py     splits an answer's text, as it arrives, into reasoning, content and calls
answer_parts.py      parsed parts of an answer, and the text still to be parsed
reasoning.py         the table of reasoning formats
tool_formats.py      the table of tool formats; a new one is a row there
json_calls.py        calls that are JSON objects: hermes, llama3_json, mistral, granite, cohere_command3, apertus, xlam
literal_calls.py     calls with arguments in Python's or Gemma's notation: pythonic, lfm2, olmo3, gemma4
harmony.py           answers that are messages in channels: gpt-oss
xml_calls.py         calls that are elements with a text for each parameter: qwen3_coder, glm45, minimax_m2, kimi_k3
named_calls.py       calls with a name before their arguments: deepseek_v3, deepseek_v31, kimi_k2
model_formats.py     the formats of one model, by flags or from its chat template

Everything here is sans-IO.
"""
