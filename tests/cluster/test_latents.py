"""A model whose blocks hold latents through gateway, prefill worker, pool and decode worker: transformers' tokens."""

from __future__ import annotations

import asyncio
import pathlib
import tempfile

import torch
from transformers import AutoModelForCausalLM

from pillion import Delta
from pillion.engine.backends.backend import kv_layout
from pillion.engine.checkpoints.prepare import prepare
from tests.support.components import running_components
from tests.support.families import FAMILIES, make_model, tokens_of
from tests.support.oracle import Oracle, first_difference

PROMPTS = [tokens_of(70, 2), tokens_of(70, 2)[:40] + tokens_of(20, 3), tokens_of(33, 4), [3]]


async def test_served_and_cached_tokens_match_transformers(tmp_path: pathlib.Path) -> None:
    folder, flags = make_model(tmp_path / "model", FAMILIES["deepseek-v3"])
    layout = kv_layout(prepare(flags), 16)
    # A token has 32 latents and 16 rotated values in each of two layers, once for all heads.
    assert layout.block_bytes == 2 * 16 * (32 + 16) * 4
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    model = {"model": str(folder), "dtype": "float32", "max_model_len": 512}
    gateway = {"split_policy": "fraction:0.5", "chunk_size": 16}
    with tempfile.TemporaryDirectory(prefix="pil-") as short:
        async with running_components(pathlib.Path(short), model=model, gateway=gateway) as components:

            async def ask(prompt: list[int]) -> list[Delta]:
                options = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
                return [delta async for delta in components.client.generate(prompt, **options)]

            async def check() -> list[int]:
                found = await asyncio.gather(*(ask(prompt) for prompt in PROMPTS))
                for prompt, deltas in zip(PROMPTS, found, strict=True):
                    tokens = [token for delta in deltas for token in delta.token_ids]
                    assert first_difference(oracle.greedy(prompt, 24), tokens, 1e-3) == ""
                return [deltas[-1].timings.cached_tokens for deltas in found]

            await check()
            assert await check() == [64, 48, 32, 0]
            await components.proven()
