"""Reads how models write their reasoning and their calls of tools. Open answer_reader.py first.

answer_reader.py     an answer's text, piece by piece, to reasoning, content and calls
answer_parts.py      what became certain of an answer, and the text that is still to be read
reasoning.py         the table of reasoning formats
tool_formats.py      the table of tool formats; a new one is a row there
json_calls.py        calls that are JSON objects: hermes, llama3_json, mistral, granite, cohere_command3, apertus, xlam
literal_calls.py     calls with arguments in Python's notation or Gemma's: pythonic, lfm2, olmo3, gemma4
harmony.py           answers that are messages in channels: gpt-oss
xml_calls.py         calls that are elements with a text for each parameter: qwen3_coder, glm45, minimax_m2, kimi_k3
named_calls.py       calls with a name before their arguments: deepseek_v3, deepseek_v31, kimi_k2
model_formats.py     the formats of one model, chosen by flags or found in its chat template

Everything here is sans-IO: text goes in, and parts come out.
"""
