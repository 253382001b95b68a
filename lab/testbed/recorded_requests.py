"""Requests of every kind to a small model whose gateway records them, and replays of their bundles."""

from __future__ import annotations

import pathlib
from typing import Any

from lab.testbed.conditions import until
from lab.testbed.random_adapter import random_adapter_folder
from lab.testbed.tiny_model import byte_prompt, save_model
from pillion import AsyncClient
from pillion.engine.models.config_parser import load_config
from pillion.gateway.recorder.record_store import read_named
from pillion.records.replay import run_replay
from pillion.types import SAMPLING_OPTIONS, StructuredOutputs

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TEMPLATE = (
    "{% if tools %}Tools:{% for tool in tools %}{{ tool.function.name }} {% endfor %}Write <tool_call>.{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}<|im_start|>assistant\n"
)
MESSAGES = [{"role": "user", "content": "How far is Bonn?"}]
TOOL = {
    "type": "function",
    "function": {"name": "near", "parameters": {"type": "object", "properties": {"city": {"enum": ["Bonn", "Ulm"]}}}},
}
_IDS = byte_prompt(3, 90)
_PENALTIES = [name for name in SAMPLING_OPTIONS if name.endswith("_penalty")]
# Kinds of requests by name: prompt and options.
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "greedy": (_IDS, {"temperature": 0, "ignore_eos": True}),
    "drawn": (_IDS, {"temperature": 1.0, "ignore_eos": True}),
    "of three": (_IDS, {"n": 3, "seed": 5, "temperature": 0.9, "top_p": 0.9, "top_k": 40}),
    "the best": (_IDS, {"n": 1, "best_of": 3, "temperature": 1.0}),
    "penalties": (_IDS, {"seed": -9, **dict.fromkeys(_PENALTIES, 1.2)}),
    "biased": (_IDS, {"logit_bias": {40: 5.0, 41: -5.0}, "allowed_token_ids": tuple(range(30, 90)), "logprobs": 2}),
    "stopped": ("Once upon a time", {"stop": ("e", "t "), "temperature": 1.0, "min_tokens": 3, "bad_words": ("a",)}),
    "regex": ("A word:", {"structured_outputs": StructuredOutputs(regex="[a-c]{5,9}[xyz]")}),
    "grammar": (_IDS, {"structured_outputs": StructuredOutputs(grammar='start: ("ab" | "cd")+ "."'), "n": 2}),
    "chat": (MESSAGES, {"temperature": 0.8}),
    "tools": (MESSAGES, {"tools": (TOOL,), "tool_choice": "required", "max_tokens": 80}),
    "adapter": (_IDS, {"model": "red", "temperature": 0.7}),
}


def recorded_model(folder: pathlib.Path, **options: Any) -> tuple[pathlib.Path, pathlib.Path]:
    """Write a small random model whose template supports tools, and an adapter for it; return their folders."""
    model = save_model(folder / "tiny", template=TEMPLATE, marks=MARKS, **options)
    return model, random_adapter_folder(load_config(model), folder / "red", 1, 4)


async def ask(client: AsyncClient, kind: str, prompt: list[int] | None = None) -> None:
    """Send a request of one kind and read its answer; ``prompt`` overrides a prompt of ids."""
    own, asked = KINDS[kind]
    asked = {"model": "tiny", "max_tokens": 24, **asked}
    if own is MESSAGES:
        stream = client.chat(MESSAGES, **asked)
    else:
        stream = client.generate(prompt if prompt and own is _IDS else own, **asked)
    async for _ in stream:
        pass


def bundles_in(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob("*.json"))


async def bundles_of(folder: pathlib.Path, count: int) -> list[pathlib.Path]:
    """Wait for ``count`` bundles and return their files."""
    await until(f"{count} bundles to be written", lambda: len(bundles_in(folder)) >= count)
    return bundles_in(folder)


async def replayed(path: pathlib.Path, target: str, **more: Any) -> tuple[int, list[str]]:
    """Replay a bundle; return the exit status and the lines. Raises ConfigError."""
    lines: list[str] = []
    asked: dict[str, Any] = {"model": "", "any_model": False, "plan": "", **more}
    bundle, verified = read_named(str(path), "", "")
    status = await run_replay(bundle, verified, {"target": target}, say=lines.append, **asked)
    return status, lines
