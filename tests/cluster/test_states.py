"""A model whose layers have states, through the whole line: transformers' tokens, beside others, under each split
policy, and over the death of its prefill worker, its decode worker and its KV node."""

from __future__ import annotations

import asyncio
import itertools
import pathlib
import signal
import tempfile

import pytest
import torch
from transformers import AutoModelForCausalLM

from lab.testbed.cluster import AMID_STEPS, ServedCluster, served
from lab.testbed.conditions import wait_for
from pillion import AsyncClient, Delta
from tests.support.adapters import adapted_model, make_adapter
from tests.support.cpu_model import needs_kernels
from tests.support.families import make_model, tokens_of
from tests.support.hybrids import HYBRIDS
from tests.support.oracle import Oracle, first_difference

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("own_cache")]

# The second prompt continues from the middle of the first one; the last two have no whole block.
PROMPTS = [tokens_of(70, 2), tokens_of(70, 2)[:40] + tokens_of(20, 3), tokens_of(33, 4), tokens_of(9, 5), [3]]
WHOLE = [64, 48, 32, 0, 0]
# Length of the common prefix of the first two prompts, and the block size.
PARTING, BLOCK = 32, 16
# A prefill range's chunks have two blocks; a step computes one chunk.
FLAGS = ("--dtype", "float32", "--max-model-len", "512", "--kv-pool-bytes", "16MiB")
CHUNKED = (*FLAGS, "--chunk-size", "32", "--max-num-batched-prefill-tokens", "32")
TOKENS, HELD_AT_STEP = 24, 12
RED = "red"
# Max repetitions of an answer until some of its tokens were drafted.
MAX_ASKED = 50
AMID_RANGE, AMID_COMMIT = "prefill, before a launch", "kvnode, after a commit"


class HybridAnswers:
    """Requests to a cluster, checked against transformers, with PEFT's adapter for the model RED."""

    def __init__(self, folder: pathlib.Path, cluster: ServedCluster, adapter: pathlib.Path | None = None) -> None:
        self._oracles = {"": Oracle(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))}
        if adapter is not None:
            self._oracles[RED] = Oracle(adapted_model(folder, adapter))
        self._cluster = cluster

    def check(
        self, prompts: list[list[int]], kill: bool = False, n: int = 1, models: tuple[str, ...] = ("",)
    ) -> list[Delta]:
        """Asks all prompts at once, for the models in turn and for ``n`` answers each, and again if ``kill`` says so
        amid a strike. Returns the last messages of the answers, whose tokens are transformers'."""
        asked = list(zip(itertools.cycle(models), prompts, strict=False))
        last = []
        for (model, prompt), deltas in zip(asked, asyncio.run(self._ask(asked, kill, n)), strict=True):
            for index in range(n):
                tokens = [token for delta in deltas if delta.index == index for token in delta.token_ids]
                assert first_difference(self._oracles[model].greedy(prompt, TOKENS), tokens, 1e-3) == "", model
            last.append(deltas[-1])
        return last

    async def _ask(self, asked: list[tuple[str, list[int]]], kill: bool, n: int) -> list[list[Delta]]:
        async with AsyncClient(self._cluster.target) as client:
            asking = asyncio.gather(*(self._one(client, *one, n) for one in asked))
            if kill:
                await asyncio.to_thread(self._cluster.struck)
            return await asking

    @staticmethod
    async def _one(client: AsyncClient, model: str, prompt: list[int], n: int) -> list[Delta]:
        options = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, "model": model, "n": n}
        return [delta async for delta in client.generate(prompt, **options)]


def red(folder: pathlib.Path) -> tuple[pathlib.Path, tuple[str, ...]]:
    """Write an adapter of attention and of layers with states. Return its folder, and its serving flags."""
    targets = ["q_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "in_proj", "out_proj", "f_b_proj"]
    adapter = make_adapter(folder, folder / "red", r=4, target_modules=targets)
    return adapter, ("--enable-lora", "--lora-modules", f"{RED}={adapter}")


def cached(last: list[Delta]) -> list[int]:
    return [delta.usage.cached_tokens for delta in last if delta.usage is not None]


def prefilled(last: list[Delta]) -> list[int]:
    return [delta.timings.prefilled_tokens for delta in last if delta.timings is not None]


@pytest.mark.parametrize(
    "name",
    [
        "qwen3-next",
        pytest.param("kimi-linear", marks=pytest.mark.long),
    ],
)
def test_tokens_match_transformers_despite_kills(tmp_path: pathlib.Path, name: str) -> None:
    folder = make_model(tmp_path / "model", HYBRIDS[name])[0]
    adapter, flags = red(folder)
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as short,
        served(pathlib.Path(short), str(folder), *CHUNKED, *flags, faults=True) as cluster,
    ):
        answers = HybridAnswers(folder, cluster, adapter)
        first = answers.check(PROMPTS)
        assert (cached(first), prefilled(first)) == ([0] * len(PROMPTS), WHOLE)
        assert not any(delta.timings.replays for delta in first if delta.timings is not None)
        # An answer may end before the node has its last blocks and states.
        wait_for("all states kept", cluster.idle)
        again = answers.check(PROMPTS)
        assert (cached(again), prefilled(again)) == (WHOLE, [0] * len(PROMPTS))
        for found in (0, WHOLE[0]):
            assert cached(answers.check(PROMPTS[:1], models=(RED,))) == [found]
            wait_for("all states kept", cluster.idle)
        # The second step of the range comes when its first chunk is committed, with no state behind it.
        for seed, (point, passing, victim) in enumerate(
            [(AMID_RANGE, 2, ""), (AMID_STEPS, HELD_AT_STEP, ""), (AMID_COMMIT, 2, "")]
        ):
            cluster.arm(passing, signal.SIGKILL, point=point, victim=victim)
            asked = [tokens_of(70, 10 + seed), tokens_of(50, 20 + seed), PROMPTS[1]]
            answers.check(asked, kill=True, models=("", RED))
            wait_for("the cluster to serve", cluster.serving)
        wait_for("all slots back", cluster.idle)


@pytest.mark.long
def test_a_split_prompt_stores_and_finds_states(tmp_path: pathlib.Path) -> None:
    """Other split policies, with kills: test_states_any.py."""
    folder = make_model(tmp_path / "model", HYBRIDS["granite-hybrid"])[0]
    adapter, flags = red(folder)
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as short,
        served(pathlib.Path(short), str(folder), *CHUNKED, *flags, split_policy="fraction:0.5", faults=True) as cluster,
    ):
        answers = HybridAnswers(folder, cluster, adapter)
        first = answers.check(PROMPTS)
        # One of the first two may come when the other has left a state where they part, or where a step ended before.
        assert all(found in (0, BLOCK, PARTING) for found in cached(first)[:2])
        assert cached(first)[2:] == [0] * 3
        assert prefilled(first)[2:] == [16, 0, 0]
        wait_for("all states kept", cluster.idle)
        again = cached(answers.check(PROMPTS))
        # Whichever of the first two texts came second left a state where they part, and has one at its end only where
        # its worker's stock had room for both.
        assert all(found in (whole, PARTING) for found, whole in zip(again[:2], WHOLE[:2], strict=True))
        assert again[2:] == WHOLE[2:]
        assert again[:2] != [PARTING] * 2
        cluster.arm(HELD_AT_STEP, signal.SIGKILL)
        answers.check(PROMPTS, kill=True, models=("", RED))
        wait_for("all slots back", cluster.idle)


@pytest.mark.long
def test_draft_tokens_change_no_token(tmp_path: pathlib.Path) -> None:
    """Draft tokens that were wrong leave no trace in a state, also where a decode worker dies amid answers."""
    folder = make_model(tmp_path / "model", HYBRIDS["lfm2"])[0]
    drafting = "--speculative-config", '{"method": "suffix", "num_speculative_tokens": 4}'
    looping = [tokens_of(12, 7) * 4, *PROMPTS]
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as short,
        served(pathlib.Path(short), str(folder), *CHUNKED, *drafting, split_policy="colocated", faults=True) as cluster,
    ):
        answers = HybridAnswers(folder, cluster)
        answers.check(looping)
        # Measured costs determine the number of draft tokens, with the most for one stream.
        drafted = right = 0
        for _ in range(MAX_ASKED):
            for delta in answers.check(looping[:1]):
                assert delta.usage is not None
                drafted, right = drafted + delta.usage.guessed_tokens, right + delta.usage.accepted_tokens
            if right:
                break
        assert 0 < right <= drafted
        cluster.arm(HELD_AT_STEP // 2, signal.SIGKILL)
        answers.check(looping, kill=True)
        wait_for("all slots back", cluster.idle)


@pytest.mark.long
@needs_kernels
def test_ranks_continue_from_states_of_stages(tmp_path: pathlib.Path) -> None:
    """A prefill worker of two stages and a decode worker of two ranks, with hits, draft tokens, several answers to a
    prompt, and the death of each worker."""
    folder = make_model(tmp_path / "model", HYBRIDS["qwen3-next"])[0]
    processes = "--tensor-parallel-size", "2", "--prefill-tensor-parallel-size", "1", "--pipeline-parallel-size", "2"
    drafting = "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}'
    prompts, whole = [tokens_of(12, 7) * 12, *PROMPTS], [128, *WHOLE]
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as short,
        served(pathlib.Path(short), str(folder), *CHUNKED, *processes, *drafting, faults=True) as cluster,
    ):
        answers = HybridAnswers(folder, cluster)
        first = answers.check(prompts)
        assert (cached(first), prefilled(first)) == ([0] * len(prompts), whole)
        wait_for("all states kept", cluster.idle)
        again = answers.check(prompts)
        assert (cached(again), prefilled(again)) == (whole, [0] * len(prompts))
        answers.check(prompts[:2], n=3)
        for point, passing in ((AMID_RANGE, 2), (AMID_STEPS, HELD_AT_STEP // 2)):
            cluster.arm(passing, signal.SIGKILL, point=point)
            answers.check([tokens_of(100, 30 + passing), prompts[2]], kill=True)
            wait_for("the cluster to serve", cluster.serving)
        wait_for("all slots back", cluster.idle)
