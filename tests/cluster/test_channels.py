"""Answers in messages in channels, as gpt-oss writes them, of a small random model on real components."""

from __future__ import annotations

import concurrent.futures
import json
import pathlib
import signal
import tempfile
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from lab.testbed.cluster import served
from lab.testbed.conditions import WITHIN_S, result_of, until, wait_for
from lab.testbed.ports import free_port
from lab.testbed.tiny_model import save_model
from pillion import Client
from pillion.gateway.formats.harmony import HARMONY_MARKS
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
# First mark's token, after the bytes: messages begin with reasoning, and are not short.
FIRST_MARK = 258
THINKING = {2 + ord("a") - ord("!"): 5.0, FIRST_MARK + HARMONY_MARKS.index("<|end|>"): 3.0}
STEPS_BETWEEN_LOOKS = 3


async def test_reasoning_tool_calls_and_structured_output_in_channels(tmp_path: pathlib.Path) -> None:
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
                messages += [one.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
                again = await client.chat.completions.create(**asked, messages=messages, tools=[tool])
            await running.proven()
    assert json.loads(call.function.arguments)["days"] in (1, 2)
    assert json.loads(shaped.choices[0].message.content)["days"] in (1, 2)
    assert again.usage.prompt_tokens > called.usage.prompt_tokens


def ask_by_grpc(client: Client, found: dict[int, list[str]]) -> dict[int, list[str]]:
    """Two answers of a conversation: reasoning, content and calls of each, which ``found`` has as they come."""
    tools: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    asked = {"max_tokens": 200, "n": 2, "seed": 1, "temperature": 1.0, "logit_bias": THINKING}
    for delta in client.chat([{"role": "user", "content": "Bonn?"}], tools=tools, tool_choice="required", **asked):
        answer = found.setdefault(delta.index, ["", "", ""])
        answer[0] += delta.reasoning
        answer[1] += delta.text
        answer[2] += "".join(f"{part.name}{part.arguments}" for part in delta.tool_calls)
    return found


def ask_by_http(client: openai.OpenAI, found: dict[int, list[str]]) -> dict[int, list[str]]:
    """Repeat a gRPC request over HTTP; add each choice's reasoning, text and calls to ``found``."""
    asked: dict[str, Any] = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": "Bonn?"}],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}],
        "tool_choice": "required",
        "seed": 1,
        "logit_bias": {str(token): bias for token, bias in THINKING.items()},
    }
    for event in client.chat.completions.create(**asked, max_tokens=200, n=2, temperature=1.0, stream=True):
        for choice in event.choices:
            answer = found.setdefault(choice.index, ["", "", ""])
            answer[0] += getattr(choice.delta, "reasoning_content", None) or ""
            answer[1] += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                answer[2] += f"{part.function.name or ''}{part.function.arguments or ''}"
    return found


@pytest.mark.cluster
@pytest.mark.long
def test_both_apis_agree_after_a_kill_between_messages(tmp_path: pathlib.Path) -> None:
    """The decode worker is killed amid reasoning; the answers are replayed, and continue within a message."""
    tiny = save_model(tmp_path / "tiny", template=TEMPLATE, marks=HARMONY_MARKS)
    port = free_port()
    flags = ("--dtype", "float32", "--max-model-len", "1024", "--kv-pool-bytes", str(2**22), "--http-port", str(port))
    url = f"http://127.0.0.1:{port}/v1"
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as short,
        served(pathlib.Path(short), str(tiny), *flags, faults=True) as running,
        Client(running.target, resume_timeout_s=WITHIN_S) as grpc_client,
        openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=WITHIN_S) as http_client,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        wanted = ask_by_grpc(grpc_client, {})
        assert ask_by_http(http_client, {}) == wanted
        running.arm(STEPS_BETWEEN_LOOKS, signal.SIGSTOP)
        found: tuple[dict[int, list[str]], ...] = ({}, {})
        asked = (
            pool.submit(ask_by_grpc, grpc_client, found[0]),
            pool.submit(ask_by_http, http_client, found[1]),
        )

        def all_think() -> bool:
            return all(len(one) == 2 and all(answer[0] for answer in one.values()) for one in found)

        with running.holding_all("thoughts of all answers", all_think, STEPS_BETWEEN_LOOKS) as worker:
            worker.kill()
        assert [result_of("an answer", each) for each in asked] == [wanted, wanted]
        assert all(thought and not text for thought, text, _ in wanted.values())
        for _, _, call in wanted.values():
            assert json.loads(call.removeprefix("weather"))["days"] in (1, 2)
        wait_for("all slots back", running.idle)
