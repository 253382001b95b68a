"""Partial blocks in the real components: a conversation's next turn computes less, and says what transformers says."""

from __future__ import annotations

import pathlib
import tempfile
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from pillion import Delta
from testbed.tiny_model import byte_prompt, save_model
from tests.support.components import Components, running_components
from tests.support.oracle import Oracle, first_difference

ASKED: dict[str, Any] = {"temperature": 0.0, "max_tokens": 9, "ignore_eos": True}


def computed(components: Components) -> int:
    """How many tokens of prompts the decode worker has computed."""
    found: int = components.decode.worker._meter.totals()["step_tail_tokens"]
    return found


async def ask(components: Components, tokens: list[int], **options: Any) -> tuple[list[int], Delta]:
    deltas = [delta async for delta in components.client.generate(tokens, **ASKED | options)]
    return [token for delta in deltas for token in delta.token_ids], deltas[-1]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
async def test_turns_copy_what_their_histories_left(kernels: str, tmp_path: pathlib.Path) -> None:
    folder = save_model(tmp_path / "tiny")
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(folder))
    model = {"model": str(folder), "dtype": "float32", "max_model_len": 512}
    with tempfile.TemporaryDirectory(prefix="pil-") as short:
        own: dict[str, Any] = {"prefill": {"cpu_kernels": kernels}, "decode": {"cpu_kernels": kernels}}
        gateway = {"split_policy": "colocated"}
        async with running_components(pathlib.Path(short), model=model, gateway=gateway, **own) as components:
            text = byte_prompt(1, 37)
            answer, _ = await ask(components, text)
            assert computed(components) == 37
            for turn in range(4):
                text = [*text, *answer, *byte_prompt(2 + turn, 5)]
                before = computed(components)
                answer, last = await ask(components, text)
                assert not first_difference(oracle.greedy(text, 9), answer, 1e-3)
                # All but the answer's last token have their KV: those in whole blocks, and those that were copied.
                assert computed(components) - before == 1 + 5
                assert last.timings.cached_tokens == (len(text) - 6) // 16 * 16
            before = computed(components)
            await ask(components, text, cache_salt="another's")
            assert computed(components) - before == len(text)
            # A warmed prompt, which has no answer, leaves its partial block as well.
            prompt = byte_prompt(9, 45)
            await ask(components, prompt, max_tokens=0)
            before = computed(components)
            await ask(components, [*prompt, 7])
            assert computed(components) - before == 1
            await components.proven()
