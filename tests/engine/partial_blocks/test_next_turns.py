"""Partial blocks in the real components: a conversation's next turn computes less, with transformers' tokens."""

from __future__ import annotations

import asyncio
import pathlib
import random
import tempfile
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from lab.testbed.conditions import until
from lab.testbed.tiny_model import byte_prompt, save_model
from pillion import Delta
from pillion.observability import metric_catalog as names
from pillion.settings.speculative_config import parse_speculative_config
from pillion.types import StructuredOutputs
from tests.support.components import Components, running_components
from tests.support.oracle import Oracle, first_difference

ASKED: dict[str, Any] = {"temperature": 0.0, "max_tokens": 9, "ignore_eos": True}


def computed(components: Components) -> int:
    """Return the decode worker's number of computed prompt tokens."""
    found: int = components.decode.worker._meter.totals()["step_tail_tokens"]
    return found


async def ask(components: Components, tokens: list[int], **options: Any) -> tuple[list[int], Delta]:
    deltas = [delta async for delta in components.client.generate(tokens, **ASKED | options)]
    # The last delta does not wait for the answer's blocks to reach the node.
    await components.proven()
    return [token for delta in deltas for token in delta.token_ids], deltas[-1]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
async def test_turns_copy_partial_blocks_of_their_history(kernels: str, tmp_path: pathlib.Path) -> None:
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
                # All but the answer's last token have KV, in whole blocks or copied.
                assert computed(components) - before == 1 + 5
                assert last.timings.cached_tokens == (len(text) - 6) // 16 * 16
            before = computed(components)
            await ask(components, text, cache_salt="another's")
            assert computed(components) - before == len(text)
            # A warmed prompt, without an answer, also leaves its partial block.
            prompt = byte_prompt(9, 45)
            await ask(components, prompt, max_tokens=0)
            before = computed(components)
            await ask(components, [*prompt, 7])
            assert computed(components) - before == 1
            await components.proven()


KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"n": 3, "seed": 5, "temperature": 0.9},
    {"max_tokens": 40},
    {"max_tokens": 0},
    {"prompt_logprobs": 1},
    {"stop": ("e", "Q"), "seed": 8, "temperature": 1.0, "max_tokens": 60},
    {"structured_outputs": StructuredOutputs(regex="[a-z]{20}"), "ignore_eos": False, "max_tokens": 30},
)
# Each kind with nine prompts and three salts, with and without a cancellation.
REQUESTS = 84


@pytest.mark.parametrize("policy", ["disaggregated", "auto"])
async def test_only_partial_blocks_stay_leased_without_a_request(policy: str, tmp_path: pathlib.Path) -> None:
    """After requests of every kind, some cancelled, only partial blocks hold slots, and the worker's metric counts
    these."""
    folder = save_model(tmp_path / "tiny")
    model = {"model": str(folder), "dtype": "float32", "max_model_len": 512}
    draw = random.Random(7)

    async def one(components: Components, number: int) -> None:
        tokens = byte_prompt(number % 9, draw.randrange(1, 300))
        stream = components.client.generate(tokens, **ASKED | KINDS[number % len(KINDS)], cache_salt=str(number % 3))
        after = draw.randrange(1, 8) if number % 3 == 0 else -1
        async for _ in stream:
            after -= 1
            if not after:
                break
        await stream.aclose()

    with tempfile.TemporaryDirectory(prefix="pil-") as short:
        draft_tokens = {
            "speculative_config": parse_speculative_config('{"method": "ngram", "num_speculative_tokens": 3}')
        }
        where: dict[str, Any] = {"node": {"kv_pool_bytes": 2**22}, "gateway": {"split_policy": policy}}
        async with running_components(pathlib.Path(short), model=model, decode=draft_tokens, **where) as components:
            at_once = asyncio.Semaphore(8)

            async def in_turn(number: int) -> None:
                async with at_once:
                    await one(components, number)

            await asyncio.gather(*map(in_turn, range(REQUESTS)))
            await components.proven()
            pool, meters = components.kvnode.pool, components.decode.worker.meters

            def kept() -> int:
                return int(meters.collect()[names.PARTIAL_BLOCKS][()])

            await until(
                "all slots but those of partial blocks to be given back",
                lambda: pool.ledger.status().leased_blocks == kept(),
                saw=lambda: f"{pool.ledger.status().leased_blocks} leased, {kept()} partial blocks",
            )
            status = pool.ledger.status()
            assert 0 < kept() <= status.total_blocks // 100
            assert status.free_blocks + status.committed_blocks + kept() == status.total_blocks
            held = ("tickets", "reserved_blocks", "pinned_blocks", "quarantined_blocks")
            assert [getattr(status, name) for name in held] == [0, 0, 0, 0]
            await components.proven()
