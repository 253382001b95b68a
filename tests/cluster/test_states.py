"""A model whose layers have states, through the whole line: transformers' tokens, beside others, and over the death of
its decode worker."""

from __future__ import annotations

import asyncio
import pathlib
import signal
import tempfile

import pytest
import torch
from transformers import AutoModelForCausalLM

from pillion import AsyncClient
from testbed.cluster import served
from testbed.conditions import wait_for
from tests.support.families import make_model, tokens_of
from tests.support.hybrids import HYBRIDS
from tests.support.oracle import Oracle, first_difference

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("own_cache")]

PROMPTS = [tokens_of(70, 2), tokens_of(70, 2)[:40] + tokens_of(20, 3), tokens_of(33, 4), [3]]
FLAGS = ("--dtype", "float32", "--max-model-len", "512", "--kv-pool-bytes", "16MiB")
TOKENS, HELD_AT_STEP = 24, 12


async def ask(client: AsyncClient, prompt: list[int]) -> tuple[list[int], int]:
    """Returns the tokens of an answer, and how many of the prompt's were found."""
    options = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
    deltas = [delta async for delta in client.generate(prompt, **options)]
    assert deltas[-1].usage is not None
    return [token for delta in deltas for token in delta.token_ids], deltas[-1].usage.cached_tokens


@pytest.mark.parametrize("name", ["qwen3-next", pytest.param("lfm2", marks=pytest.mark.long)])
def test_tokens_are_transformers_and_survive_a_killed_worker(tmp_path: pathlib.Path, name: str) -> None:
    folder = make_model(tmp_path / "model", HYBRIDS[name])[0]
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    wanted = [oracle.greedy(prompt, TOKENS) for prompt in PROMPTS]

    async def check(target: str, kill: bool) -> list[int]:
        found = []
        async with AsyncClient(target) as client:
            asking = asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS))
            if kill:
                await asyncio.to_thread(cluster.struck)
            for expected, (tokens, cached) in zip(wanted, await asking, strict=True):
                assert first_difference(expected, tokens, 1e-3) == ""
                found.append(cached)
        return found

    with (
        tempfile.TemporaryDirectory(prefix="pil-") as short,
        served(pathlib.Path(short), str(folder), *FLAGS, split_policy="", faults=True) as cluster,
    ):
        assert not cluster.components("prefill")
        asyncio.run(check(cluster.target, False))
        assert asyncio.run(check(cluster.target, False)) == [64, 48, 32, 0]
        cluster.arm(HELD_AT_STEP, signal.SIGKILL)
        asyncio.run(check(cluster.target, True))
        wait_for("all slots back", cluster.idle)
