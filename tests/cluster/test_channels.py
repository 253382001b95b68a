"""Answers in messages in channels, as gpt-oss writes them, of a small random model on real components."""

from __future__ import annotations

import json
import pathlib
import tempfile
from typing import Any

import openai
from tokenizers import Tokenizer

from pillion.gateway.formats.harmony import HARMONY_MARKS
from testbed.conditions import until
from testbed.tiny_model import save_model
from tests.support.components import running_components

TEMPLATE = (
    "{% for tool in tools or [] %}{{ 'functions.' + tool.function.name + tool.function.description }}{% endfor %}"
    "{% for message in messages %}{{ '<|start|>' + message.role }}{% if 'tool_calls' in message %}"
    "{{ '<|channel|>analysis<|message|>' + (message.thinking or '') + '<|end|><|start|>assistant to=functions.' }}"
    "{{ message.tool_calls[0].function.name + '<|channel|>commentary json<|message|>' }}"
    "{{ message.tool_calls[0].function.arguments | tojson + '<|call|>' }}{% else %}"
    "{{ ('<|channel|>final' if message.role == 'assistant' else '') + '<|message|>' + message.content + '<|end|>' }}"
    "{% endif %}{% endfor %}{{ '<|start|>assistant' }}{# <|channel|>final<|message|> #}"
)
SCHEMA = {
    "type": "object",
    "properties": {"days": {"enum": [1, 2]}},
    "required": ["days"],
    "additionalProperties": False,
}


async def test_reasoning_calls_and_shapes_in_channels(tmp_path: pathlib.Path) -> None:
    tiny = save_model(tmp_path / "tiny", template=TEMPLATE, marks=HARMONY_MARKS)
    end = Tokenizer.from_file(str(tiny / "tokenizer.json")).token_to_id("<|end|>")
    begin = Tokenizer.from_file(str(tiny / "tokenizer.json")).token_to_id("<|channel|>")
    model = {"model": str(tiny), "dtype": "float32", "max_model_len": 1024}
    shape: Any = {"type": "json_schema", "json_schema": {"name": "days", "schema": SCHEMA, "strict": True}}
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
    asked: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 200,
        "logit_bias": {str(end): 50, str(begin): 50},
        "seed": 2,
    }
    messages: list[Any] = [{"role": "user", "content": "Bonn?"}]
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        async with running_components(pathlib.Path(name), model=model) as running:
            await until("the gateway to know the worker's model", running.client.models)
            url = f"http://{running.gateway.http_address}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
                called = await client.chat.completions.create(
                    **asked, messages=messages, tools=[tool], tool_choice="required"
                )
                shaped = await client.chat.completions.create(**asked, messages=messages, response_format=shape)
                (one,) = called.choices
                assert one.finish_reason == "tool_calls"
                (call,) = one.message.tool_calls
                assert call.function.name == "weather"
                # The call goes back as it came, with what was thought before it.
                messages += [one.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
                again = await client.chat.completions.create(**asked, messages=messages, tools=[tool])
            await running.proven()
    assert json.loads(call.function.arguments)["days"] in (1, 2)
    assert json.loads(shaped.choices[0].message.content)["days"] in (1, 2)
    assert again.usage.prompt_tokens > called.usage.prompt_tokens
