"""Models with states whatever comes together: prompts that share any part of what came before, split policies, several
answers to one, a pool that is too small for all of them, a draft model or a head that drafts, and kills at named
points. Each answer is transformers'."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import random
import signal
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM

from lab.testbed.conditions import until, wait_for
from lab.testbed.defaults import DECODE
from lab.testbed.eagle_heads import save_head
from lab.testbed.faults.board import FaultBoard, hook_environment
from lab.testbed.faults.points import BY_NAME
from lab.testbed.hosts import hosts
from lab.testbed.tiny_model import save_model
from pillion import AsyncClient, Delta
from pillion.engine.drafts import draft_control
from pillion.kvstore.ledger.integrity import check_integrity
from pillion.settings.speculative_config import parse_speculative_config
from tests.support.components import running_components
from tests.support.families import make_model, tokens_of
from tests.support.hybrids import HYBRIDS
from tests.support.oracle import Oracle

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("own_cache")]

POLICIES = ("colocated", "disaggregated", "fraction:0.3", "fraction:0.7", "auto")
KILLS = (
    "prefill, before a launch",
    "prefill, before a commit",
    "prefill, after a commit",
    "decode, before a launch",
    "decode, after a hand-off",
    "decode, before a commit",
    "kvnode, before an adoption",
    "kvnode, after a commit",
    "kvnode, after a ticket",
)
CHUNK_TOKENS, MAX_MODEL_LEN = 32, 512
# Max repetitions of an answer until some of its tokens were drafted; memory for drafts may come late.
MAX_ASKED = 50


@dataclass(frozen=True, slots=True)
class DrawnRequest:
    """A request: its prompt, the policy of the gateway that it goes to, and the number of answers and their length."""

    prompt: tuple[int, ...]
    policy: str
    answers: int
    max_tokens: int


def drawn(rng: random.Random, policies: tuple[str, ...] = POLICIES) -> list[DrawnRequest]:
    """Draw concurrent requests. A prompt is a piece of one of two texts, with a unique part."""
    asked = []
    for _ in range(rng.randint(1, 5)):
        common = tokens_of(200, rng.randint(1, 2))[: rng.choice((0, rng.randint(1, 200), 16 * rng.randint(1, 12)))]
        own = tokens_of(rng.randint(1, 40), rng.randint(100, 104))
        asked.append(DrawnRequest((*common, *own), rng.choice(policies), rng.randint(1, 3), rng.choice((5, 30, 100))))
    return asked


async def check(oracle: Oracle, clients: Mapping[str, AsyncClient], asked: list[DrawnRequest]) -> list[Delta]:
    """Request all answers at once, and compare them with transformers. Return the last message of each request."""
    last = []
    for one, deltas in zip(
        asked, await asyncio.gather(*(_read(clients[one.policy], one) for one in asked)), strict=True
    ):
        every = {
            tuple(token for delta in deltas if delta.index == index for token in delta.token_ids)
            for index in range(one.answers)
        }
        for tokens in every:
            wrong = await asyncio.to_thread(oracle.difference, one.prompt, tokens, one.max_tokens, 1e-3)
            assert wrong == "", one
        last.append(deltas[-1])
    return last


async def _read(client: AsyncClient, one: DrawnRequest) -> list[Delta]:
    options = {"temperature": 0.0, "max_tokens": one.max_tokens, "ignore_eos": True, "n": one.answers}
    return [delta async for delta in client.generate(list(one.prompt), **options)]


def drafted(last: list[Delta]) -> int:
    """Return the number of tokens drafted for these answers."""
    return sum(delta.usage.guessed_tokens for delta in last if delta.usage is not None)


def drafting(model: pathlib.Path, folder: pathlib.Path, method: str) -> str:
    """Return the value of --speculative-config for draft tokens of a random head, or of a random model."""
    if method == "eagle3":
        draft = save_head(folder, model, aux_hidden_state_layers=(0, 1, 2))
    else:
        draft = save_model(folder, seed=3, num_hidden_layers=1, num_key_value_heads=1)
    return json.dumps({"method": method, "model": str(draft), "num_speculative_tokens": 3})


def oracle_of(model: pathlib.Path) -> Oracle:
    return Oracle(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))


@pytest.fixture
def folder() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        yield pathlib.Path(name)


async def test_random_concurrent_requests(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short form, in this process and without kills."""
    # Drafting must not depend on the machine's speed.
    monkeypatch.setattr(draft_control, "MIN_SPEEDUP", 0.0)
    monkeypatch.setattr(draft_control.DraftControl, "_estimate_worth", lambda *arguments: None)
    model = make_model(folder / "model", HYBRIDS["lfm2"])[0]
    shape = {"model": str(model), "dtype": "float32", "max_model_len": MAX_MODEL_LEN}
    oracle, rng = oracle_of(model), random.Random(54)
    async with contextlib.AsyncExitStack() as stack:
        pool = {"kv_pool_bytes": 44 * 4096}
        prefill = {"max_num_batched_prefill_tokens": CHUNK_TOKENS}
        draft_tokens = parse_speculative_config(drafting(model, folder / "head", "eagle3"))
        decode = {"speculative_config": draft_tokens}
        running = await stack.enter_async_context(
            running_components(folder, model=shape, node=pool, prefill=prefill, decode=decode, partial_block_percent=0)
        )
        clients = {
            policy: await stack.enter_async_context(
                running.another_gateway(split_policy=policy, chunk_size=CHUNK_TOKENS)
            )
            for policy in POLICIES[:3]
        }
        ledger = running.kvnode.pool.ledger
        for _ in range(2):
            await check(oracle, clients, drawn(rng, POLICIES[:3]))
        times = []
        for _ in range(2):
            [last] = await check(oracle, clients, [DrawnRequest(tuple(tokens_of(100, 7)), "disaggregated", 2, 5)])
            assert last.timings is not None
            times.append((last.timings.cached_tokens, last.timings.prefilled_tokens))
            # An answer may end before the node has its last blocks and states.
            await until("every ticket's end", lambda: not ledger.tickets)
        assert times == [(0, 96), (96, 0)]
        alone = [DrawnRequest(tuple(tokens_of(100, 7)), "colocated", 1, 30)]
        for _ in range(MAX_ASKED):
            if drafted(await check(oracle, clients, alone)):
                break
        else:
            pytest.fail("nothing is drafted")
        await until("every ticket's end", lambda: not ledger.tickets)
        check_integrity(ledger)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "slots", "method"), [("qwen3-next", 230, "draft_model"), ("granite-hybrid", 230, "eagle3")]
)
def test_random_concurrent_requests_with_kills(folder: pathlib.Path, name: str, slots: int, method: str) -> None:
    model = make_model(folder / "model", HYBRIDS[name])[0]
    oracle, rng = oracle_of(model), random.Random(name)
    draft_tokens = drafting(model, folder / "draft", method)
    with hosts(folder, "--model", str(model), "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN)) as cluster:
        cluster.environ.update(hook_environment(folder / "board"))
        cluster.defaults = {DECODE: {"partial_block_percent": 0}}
        board = FaultBoard(folder / "board")
        cluster.node("kv-a", "--kv-pool-bytes", str(slots * 4096))
        workers = (
            cluster.worker("prefill", "kv-a", "--max-num-batched-prefill-tokens", str(CHUNK_TOKENS)),
            cluster.worker("decode", "kv-a", "--speculative-config", draft_tokens),
        )
        targets = {
            policy: cluster.gateway("--split-policy", policy, "--chunk-size", str(CHUNK_TOKENS), name=f"g{number}")
            for number, policy in enumerate(POLICIES)
        }

        def all_seen() -> None:
            for number, target in enumerate(targets.values()):
                cluster.sees(target, *workers, gateway=f"g{number}")

        def idle() -> bool:
            # A restarted node may not answer yet.
            with contextlib.suppress(AssertionError):
                return cluster.idle("kv-a")
            return False

        async def one_round(asked: list[DrawnRequest]) -> list[Delta]:
            async with contextlib.AsyncExitStack() as stack:
                clients = {name: await stack.enter_async_context(AsyncClient(at)) for name, at in targets.items()}
                return await check(oracle, clients, asked)

        all_seen()
        deaths, last = 0, []
        with cluster.supervised():
            for number in range(12):
                asked, point, passing = drawn(rng), rng.choice(KILLS), rng.randint(1, 4)
                if number % 2:
                    board.arm(0, BY_NAME[point], passing, signal.SIGKILL)
                last += asyncio.run(one_round(asked))
                died = board.fired(0) is not None
                board.clear()
                if died:
                    deaths += 1
                    wait_for("the workers' return", lambda: all_back(cluster.processes))
                    all_seen()
            wait_for("all slots back", idle)
        assert deaths
        assert any(delta.timings.replays for delta in last if delta.timings is not None)


def all_back(processes: Mapping[str, object]) -> bool:
    return all(one.poll() is None for one in processes.values())  # type: ignore[attr-defined]
