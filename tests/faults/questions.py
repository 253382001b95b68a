"""The requests of runs with faults, by feature. Each has one answer, whatever happens to the cluster (I6)."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

from lab.testbed.tiny_model import byte_prompt, save_model
from pillion import Client, Delta
from pillion.types import StructuredOutputs
from tests.faults.histories import Ask

ADAPTER = "red"
# A regular expression whose answers all have the same length.
PATTERN = r"([a-z]{7}-[0-9]{3}, ){10}[A-F]{8}\."
SCHEMA = (
    '{"type": "array", "items": {"type": "integer", "minimum": 1000, "maximum": 9999}, "minItems": 20, "maxItems": 20}'
)


def _asks(ids: list[int], **asked: Any) -> Ask:
    def ask(client: Client, salt: str) -> Iterator[Delta]:
        return client.generate(ids, cache_salt=salt, **asked)

    return ask


def _chats(text: str, **asked: Any) -> Ask:
    def ask(client: Client, salt: str) -> Iterator[Delta]:
        return client.chat([{"role": "user", "content": text}], cache_salt=salt, **asked)

    return ask


def _long(tokens: int, **asked: Any) -> dict[str, Any]:
    return {"max_tokens": tokens, "ignore_eos": True, **asked}


QUESTIONS: dict[str, Ask] = {
    "greedy": _asks(byte_prompt(1, 400), **_long(300, temperature=0.0)),
    "long prompt": _asks(byte_prompt(2, 900), **_long(80, temperature=0.0)),
    "n": _asks(byte_prompt(3, 120), **_long(120, n=3, seed=5, temperature=0.9, frequency_penalty=0.2)),
    "seed": _asks(byte_prompt(4, 60), **_long(250, seed=77, temperature=1.0, top_p=0.9)),
    "logprobs": _asks(byte_prompt(5, 200), **_long(150, seed=6, temperature=0.8, logprobs=2)),
    "prompt logprobs": _asks(byte_prompt(6, 500), **_long(100, temperature=0.0, prompt_logprobs=1)),
    "stop strings": _asks(byte_prompt(7, 90), **_long(400, seed=8, temperature=1.0, stop=("e", "Q"), min_tokens=60)),
    "chat": _chats("Which ships lie in the harbour tonight?", **_long(200, seed=9, temperature=1.0)),
    "JSON schema": _chats(
        "Name some numbers.",
        max_tokens=400,
        seed=10,
        temperature=1.0,
        structured_outputs=StructuredOutputs(json=SCHEMA),
    ),
    "regex": _asks(
        byte_prompt(11, 70),
        max_tokens=400,
        seed=11,
        temperature=1.0,
        structured_outputs=StructuredOutputs(regex=PATTERN),
    ),
    "bad words": _asks(
        byte_prompt(13, 90),
        **_long(200, seed=12, temperature=1.0, bad_words=("a", "be"), allowed_token_ids=tuple(range(40, 160))),
    ),
    "adapter": _asks(byte_prompt(12, 150), model=ADAPTER, **_long(150, temperature=0.0)),
}


def write_models(folder: pathlib.Path) -> tuple[str, ...]:
    """Write the model and its adapter into ``folder``; return the flags of a cluster that serves both."""
    from pillion.engine.models.config_parser import load_config
    from tests.support.adapters import write_adapter

    model = save_model(folder / "tiny")
    adapter = write_adapter(load_config(model), folder / ADAPTER)
    return (
        str(model),
        "--enable-lora",
        "--max-loras",
        "1",
        "--max-lora-rank",
        "8",
        "--lora-modules",
        f"{ADAPTER}={adapter}",
    )
