"""Calls tools with litellm: python litellm_calls.py URL MODEL. Writes what came as JSON."""

from __future__ import annotations

import json
import sys

import litellm

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "Weather", "parameters": PARAMETERS}}]


def main() -> None:
    """Asks for a whole answer, for a stream, and with the call's result; prints the calls."""
    url, model = sys.argv[1:]
    messages = [{"role": "user", "content": "Bonn?"}]
    asked = {"model": f"openai/{model}", "api_base": url, "api_key": "none", "tools": TOOLS, "max_tokens": 300}
    asked |= {"tool_choice": "required", "parallel_tool_calls": False, "seed": 3, "num_retries": 0}
    whole = litellm.completion(messages=messages, **asked)
    chunks = list(litellm.completion(messages=messages, stream=True, **asked))
    message = whole.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    again = litellm.completion(messages=[*messages, message.model_dump(), result], **asked)
    answers = {"whole": whole, "streamed": litellm.stream_chunk_builder(chunks, messages=messages), "again": again}
    assert whole.choices[0].finish_reason == "tool_calls"
    found = {
        name: json.loads(answer.choices[0].message.tool_calls[0].function.arguments) for name, answer in answers.items()
    }
    print(json.dumps(found))


main()
