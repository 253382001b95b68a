"""64K tokens through prefill worker, pool and decode worker, against transformers at positions along the way."""

from __future__ import annotations

import asyncio
import json
import pathlib
import random
import tempfile
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from lab.testbed.tiny_model import save_model
from pillion import Delta
from tests.support.components import running_components

pytestmark = pytest.mark.long

TOKENS = 65_536
TRAINED_TOKENS = 8192
# One KV head, so that attention over 64K tokens takes seconds.
SHAPE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "factor": 8.0,
    "original_max_position_embeddings": TRAINED_TOKENS,
    "rope_theta": 500_000.0,
}
# Prompt lengths before the compared logits: around the trained length, within and at the ends of chunks and blocks, and
# the longest prompt with room for a token.
LENGTHS = (17, 512, TRAINED_TOKENS - 1, TRAINED_TOKENS + 1, 16_384, 30_011, 49_152, 65_029, TOKENS - 1)
# Tokens per forward pass of transformers. With more its masks exceed the cache, and cost as much as attention.
ORACLE_CHUNK_TOKENS = 256
ASKED: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True, "logprobs": 20}
# Log probabilities found in other orders of float32 sums are some 1e-6 apart; with a factor of 7 in place of 8 they are
# 8e-3 apart at 3,000 tokens already.
NEAR = 3e-4


@torch.inference_mode()
def wanted(folder: pathlib.Path, prompt: Sequence[int]) -> dict[int, torch.Tensor]:
    """Return transformers' log probabilities [vocabulary] of the token after a prefix of the prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    cache, found, begin = DynamicCache(config=model.config), {}, 0
    ends = sorted({*range(ORACLE_CHUNK_TOKENS, len(prompt), ORACLE_CHUNK_TOKENS), *LENGTHS})
    for end in ends:
        ids = torch.tensor([prompt[begin:end]])
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        if end in LENGTHS:
            found[end] = logits[0, -1].log_softmax(-1)
        begin = end
    return found


def distance(delta: Delta, expected: torch.Tensor) -> float:
    """Return the difference between an answer's first log probabilities and the expected ones."""
    (first,) = delta.logprobs
    assert first.top_ids
    return max(abs(float(expected[i]) - p) for i, p in zip(first.top_ids, first.top_logprobs, strict=True))


@pytest.mark.timeout(1800)
async def test_64k_token_prompts_match_transformers(tmp_path: pathlib.Path) -> None:
    folder = save_model(tmp_path / "tiny", max_position_embeddings=TOKENS, rope_parameters=SCALING, seed=3, **SHAPE)
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == SCALING["rope_type"]
    draw = random.Random(64)
    prompt = [2 + draw.randrange(256) for _ in range(TOKENS)]
    expected = await asyncio.to_thread(wanted, folder, prompt)
    model = {"model": str(folder), "dtype": "float32", "max_model_len": TOKENS}
    with tempfile.TemporaryDirectory(prefix="pil-") as short:
        async with running_components(pathlib.Path(short), model=model) as components:

            async def ask(length: int) -> Delta:
                return [delta async for delta in components.client.generate(prompt[:length], **ASKED)][-1]

            whole = await ask(TOKENS - 1)
            assert whole.timings.cached_tokens == 0
            assert whole.timings.prefilled_tokens >= TOKENS - 512 - 16
            distances = {TOKENS - 1: distance(whole, expected[TOKENS - 1])}
            for length in LENGTHS[:-1]:
                answer = await ask(length)
                assert answer.timings.cached_tokens == (length - 1) // 16 * 16
                distances[length] = distance(answer, expected[length])
            await components.proven()
    assert max(distances.values()) < NEAR, distances
