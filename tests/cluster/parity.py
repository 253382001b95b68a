"""Greedy tokens of a whole cluster against transformers', over split policies, chunk sizes and prefix hits.

`make parity` runs every combination on the demo model in fp32 and prints a table; the test beside this file runs a
pairwise subset. A token may differ only where the oracle's two best logits are closer than EPSILON (see oracle.py).
"""

from __future__ import annotations

import asyncio
import itertools
import pathlib
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from lab.testbed.plain_model import plain_folder
from pillion import AsyncClient, ChatMessage, Delta
from pillion.kvstore.ledger.integrity import check_integrity
from tests.support.components import Components, running_components
from tests.support.oracle import Oracle

# The model's fp32 logits are some tens; another summation order changes them by about 1e-4.
EPSILON = 2e-3
POLICIES = ("disaggregated", "colocated", "fraction:0.5")
CHUNK_SIZES = (16, 64, 512)
MODEL = {"model": "demo", "dtype": "float32", "max_model_len": 4096}

ENGLISH = (
    "The harbour at night was quiet, and the lamps along the pier burned with a small yellow light. "
    "A ship lay at anchor; its crew had gone ashore, all but the cook, who was counting onions. "
)
RAW = {
    "one token": "Once",
    "short": "The three largest cities of Japan are",
    "german": "Die schönste Zeit des Jahres beginnt für viele Menschen, wenn die Tage länger werden. " * 3,
    "chinese": "春天来了，花园里的花都开了，孩子们在草地上跑来跑去。" * 3,
    "arabic and emoji": "السلام عليكم، كيف 👩‍🚀🚀 حالك اليوم؟ " * 3,
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1)\n\n\n" * 3,
    "several blocks": ENGLISH * 3,
    "1200 tokens": ENGLISH * 32,
    "3000 tokens": ENGLISH * 80,
}
CHAT = {"chat": "What is the capital of France?", "chat, german": "Nenne drei Flüsse in Deutschland."}
MAX_TOKENS = {"1200 tokens": 8, "3000 tokens": 8}
# Prompts whose prefill takes many seconds.
LONG = tuple(MAX_TOKENS)
DEFAULT_MAX_TOKENS = 24


@dataclass(frozen=True, slots=True)
class ParityCase:
    """One run: a prompt by name, a gateway, and whether its prefix is cached."""

    prompt: str
    policy: str
    chunk_size: int
    warm: bool

    def __str__(self) -> str:
        return f"{self.prompt} / {self.policy} / {self.chunk_size} / {'warm' if self.warm else 'cold'}"


def full_matrix() -> list[ParityCase]:
    """Return every prompt under every policy, chunk size and cache state."""
    names = (*prompts_of(), *CHAT)
    return [ParityCase(*case) for case in itertools.product(names, POLICIES, CHUNK_SIZES, (False, True))]


def pairwise() -> list[ParityCase]:
    """Return a subset in which every pair of policy, chunk size and cache state occurs, spread over the prompts. Of the
    long ones it has the shorter."""
    names = [name for name in (*prompts_of(), *CHAT) if name not in LONG]
    rows = [
        (policy, CHUNK_SIZES[(i + j) % 3], (i + j) % 2 == 0)
        for i, policy in enumerate(POLICIES)
        for j in range(len(CHUNK_SIZES))
    ]
    cases = [ParityCase(name, *row) for name, row in zip(names, itertools.cycle(rows), strict=False)]
    return [*cases, ParityCase(LONG[0], "fraction:0.5", 512, False)]


def prompts_of() -> dict[str, str]:
    """Return raw prompts by name; the caller cuts the aligned one to whole blocks of tokens."""
    return {**RAW, "block aligned": ENGLISH}


class ParityCluster:
    """The running components, one gateway per (policy, chunk size), and the oracle."""

    def __init__(self, components: Components, oracle: Oracle, tokenizer: Any) -> None:
        self.components = components
        self.oracle = oracle
        self.tokenizer = tokenizer
        self.salts = itertools.count()

    def token_ids(self, name: str) -> list[int]:
        """Return the oracle's prompt: raw text as its tokenizer encodes it, chats by its own template."""
        if name in CHAT:
            messages = [{"role": "user", "content": CHAT[name]}]
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            return list(self.tokenizer(text, add_special_tokens=False).input_ids)
        ids = list(self.tokenizer(prompts_of()[name]).input_ids)
        return ids[: len(ids) // 16 * 16] if name == "block aligned" else ids

    async def check(self, case: ParityCase, client: AsyncClient) -> tuple[str, Delta]:
        """Run ``case``; return the error ("" if none) and the stream's last message."""
        ids = self.token_ids(case.prompt)
        limit = MAX_TOKENS.get(case.prompt, DEFAULT_MAX_TOKENS)
        salt = f"case-{next(self.salts)}"
        if case.warm:
            await self.run(case, client, ids, 1, salt)
        got, last = await self.run(case, client, ids, limit, salt)
        wrong = await asyncio.to_thread(self.oracle.difference, ids, got, limit, EPSILON)
        assert last.usage is not None
        if last.usage.prompt_tokens != len(ids):
            wrong = f"{last.usage.prompt_tokens} prompt tokens, the oracle reads {len(ids)}"
        whole_blocks = (len(ids) - 1) // 16 * 16
        if last.usage.cached_tokens != (whole_blocks if case.warm else 0):
            wrong = f"{last.usage.cached_tokens} tokens cached"
        return wrong, last

    async def run(
        self, case: ParityCase, client: AsyncClient, ids: Sequence[int], limit: int, salt: str
    ) -> tuple[list[int], Delta]:
        """Run one greedy stream; return its tokens and its last message."""
        options: dict[str, Any] = {"temperature": 0.0, "max_tokens": limit, "cache_salt": salt}
        if case.prompt in CHAT:
            stream = client.chat([ChatMessage("user", CHAT[case.prompt])], **options)
        elif case.prompt == "block aligned":
            stream = client.generate(ids, **options)
        else:
            stream = client.generate(prompts_of()[case.prompt], **options)
        got: list[int] = []
        async for delta in stream:
            got += delta.token_ids
        return got, delta


@asynccontextmanager
async def parity_cluster(folder: pathlib.Path) -> AsyncIterator[ParityCluster]:
    """Run the components on the demo model, and load transformers with the same weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pillion.config import ModelFlags
    from pillion.engine.checkpoints.prepare import prepare

    prepared = prepare(ModelFlags(**MODEL))
    tokenizer = AutoTokenizer.from_pretrained(prepared.folder)
    model = AutoModelForCausalLM.from_pretrained(plain_folder(MODEL["model"], MODEL["dtype"]), dtype=torch.float32)
    oracle = Oracle(model, prepared.eos_token_ids)
    async with running_components(folder, model=MODEL) as components:
        yield ParityCluster(components, oracle, tokenizer)


async def run_cases(cases: Sequence[ParityCase], folder: pathlib.Path) -> list[tuple[ParityCase, str]]:
    """Run ``cases`` grouped by gateway; return each with its error."""
    results = []
    async with parity_cluster(folder) as cluster:
        for (policy, chunk), group in itertools.groupby(
            sorted(cases, key=lambda case: (case.policy, case.chunk_size)), key=lambda c: (c.policy, c.chunk_size)
        ):
            async with cluster.components.another_gateway(split_policy=policy, chunk_size=chunk) as client:
                for case in group:
                    wrong, last = await cluster.check(case, client)
                    results.append((case, wrong))
                    t = last.timings
                    split = f"{t.cached_tokens}/{t.prefilled_tokens}/{t.tail_tokens}" if t else ""
                    print(f"{'ok ' if not wrong else 'BAD'} {case}  [{split}] {wrong}", flush=True)
        check_integrity(cluster.components.kvnode.pool.ledger)
    return results


def main() -> int:
    """Run the full matrix; the exit status is 0 if all cases agreed."""
    with tempfile.TemporaryDirectory(prefix="pillion-parity-") as folder:
        results = asyncio.run(run_cases(full_matrix(), pathlib.Path(folder)))
    bad = [case for case, wrong in results if wrong]
    print(f"{len(results) - len(bad)} of {len(results)} cases agree with transformers")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
