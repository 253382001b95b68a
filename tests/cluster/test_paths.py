"""Every path through the scheduler gives the same tokens: transformers' for greedy ones, each other's for seeded ones.

The components are real and run in one process over a real Redis, with a small random model in fp32.
"""

from __future__ import annotations

import asyncio
import itertools
import pathlib
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from lab.testbed.tiny_model import save_model
from pillion import AsyncClient, Delta
from tests.support.components import Components, running_components
from tests.support.drafts import speculative
from tests.support.oracle import Oracle, first_difference

EPSILON = 1e-3
BLOCK_BYTES = 8192
# Two texts repeat themselves, for prompt-lookup drafts; one does not.
PROMPTS = [[7, 8, 9, 10, 11] * 20, list(range(2, 72)), [5, 6, 7] * 11 + [9] * 30, [3]]
SALTS = itertools.count()

PATHS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "constant budget": ({}, {}),
    "small budget": ({"max_num_batched_tokens": 8, "max_num_seqs": 4}, {"split_policy": "colocated"}),
    "target": ({"target_itl_ms": 5.0}, {"split_policy": "colocated"}),
    "draft_tokens": ({"speculative_config": speculative(5)}, {"split_policy": "fraction:0.5", "chunk_size": 16}),
    "draft tokens, small budget": (
        {
            "speculative_config": speculative(5, "suffix"),
            "max_num_batched_tokens": 24,
            "max_num_seqs": 4,
            "target_itl_ms": 5.0,
        },
        {"split_policy": "colocated"},
    ),
    "whole prompts": (
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 600},
        {"enable_chunked_prefill": False, "split_policy": "fraction:0.5"},
    ),
    "no prefix caching": ({}, {"enable_prefix_caching": False, "chunk_size": 32}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save_model(tmp_path_factory.mktemp("paths") / "tiny")


@pytest.fixture(scope="module")
def oracle(folder: pathlib.Path) -> Oracle:
    return Oracle(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


@asynccontextmanager
async def components_on(model: pathlib.Path, **flags: Any) -> AsyncIterator[Components]:
    model_flags = {"model": str(model), "dtype": "float32", "max_model_len": 512}
    with tempfile.TemporaryDirectory(prefix="pil-") as short:
        async with running_components(pathlib.Path(short), model=model_flags, **flags) as components:
            yield components
            await components.proven()


async def ask(client: AsyncClient, prompt: Sequence[int], **options: Any) -> list[Delta]:
    options = {"max_tokens": 24, "ignore_eos": True, "cache_salt": f"salt {next(SALTS)}", **options}
    return [delta async for delta in client.generate(prompt, **options)]


def ids_of(deltas: Sequence[Delta], index: int = 0) -> list[int]:
    return [one for delta in deltas if delta.index == index for one in delta.token_ids]


@pytest.mark.parametrize("path", PATHS)
async def test_greedy_tokens_match_transformers(path: str, folder: pathlib.Path, oracle: Oracle) -> None:
    decode, gateway = PATHS[path]
    whole = {"enable_chunked_prefill": False, "max_num_batched_prefill_tokens": 512}
    async with components_on(
        folder, decode=decode, gateway=gateway, prefill=whole if path == "whole prompts" else {}
    ) as components:
        for again in (False, True):
            # All concurrently with two answers each, so that prompt tails, decodes, parallel samples and drafts share
            # steps.
            streams = [
                ask(components.client, prompt, temperature=0.0, n=2, cache_salt=f"{number}")
                for number, prompt in enumerate(PROMPTS)
            ]
            for prompt, deltas in zip(PROMPTS, await asyncio.gather(*streams), strict=True):
                expected = oracle.greedy(prompt, 24)
                for index in range(2):
                    assert first_difference(expected, ids_of(deltas, index), EPSILON) == ""
                usage = deltas[-1].usage
                assert usage is not None
                found = again and path != "no prefix caching"
                assert usage.cached_tokens == (len(prompt) - 1) // 16 * 16 * found
            await components.proven()


async def test_drafts_and_preemption_do_not_change_seeded_tokens(folder: pathlib.Path) -> None:
    """Drafts, preemption and other requests do not change tokens with temperature, nucleus and penalties."""
    options = {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.3, "repetition_penalty": 1.1, "max_tokens": 120}
    found = []
    for decode, slots in (
        ({}, 2000),
        ({"speculative_config": speculative(5)}, 2000),
        ({"speculative_config": speculative(3, "suffix"), "max_num_seqs": 6, "target_itl_ms": 5.0}, 40),
    ):
        async with components_on(folder, decode=decode, node={"kv_pool_bytes": slots * BLOCK_BYTES}) as components:
            assert components.kvnode.pool.ledger.num_slots == slots
            streams = [ask(components.client, prompt, seed=11 + n, n=2, **options) for n, prompt in enumerate(PROMPTS)]
            deltas = await asyncio.gather(*streams)
            found.append([ids_of(stream, index) for stream in deltas for index in range(2)])
            crowded = slots == 40
            assert any(stream[-1].timings.preemptions for stream in deltas if stream[-1].timings) or not crowded
    assert found[0] == found[1] == found[2]
    assert all(len(tokens) == 120 for tokens in found[0])


async def test_penalized_greedy_tokens_and_logprobs_match_transformers(folder: pathlib.Path, oracle: Oracle) -> None:
    async with components_on(folder, decode={"speculative_config": speculative(4)}) as components:
        for prompt in PROMPTS:
            deltas = await ask(components.client, prompt, temperature=0.0, repetition_penalty=1.3, logprobs=3)
            ids = torch.tensor([list(prompt)])
            processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)])
            logprobs = [one for delta in deltas for one in delta.logprobs]
            assert [one.token_id for one in logprobs] == ids_of(deltas)
            for one in logprobs:
                with torch.inference_mode():
                    logits = oracle.model(ids).logits[:, -1].float()
                best = processors(ids, logits.clone())[0].topk(2)
                assert one.token_id == int(best.indices[0]) or float(best.values[0] - best.values[1]) < EPSILON
                raw = logits[0].log_softmax(-1)
                assert one.logprob == pytest.approx(float(raw[one.token_id]), abs=1e-3)
                assert list(one.top_logprobs) == pytest.approx(raw.topk(3).values.tolist(), abs=1e-3)
                ids = torch.cat((ids, torch.tensor([[one.token_id]])), 1)
