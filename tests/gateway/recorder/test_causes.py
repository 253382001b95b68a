"""`pillion explain` names the cause of a slow request; each cause is produced in a real gateway over fake workers."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lab.testbed.conditions import until
from lab.testbed.random_adapter import random_adapter_folder
from lab.testbed.recorded_requests import recorded_model
from pillion import StructuredOutputs
from pillion.engine.models.config_parser import load_config
from pillion.gateway.grammars.grammar_checker import GrammarChecker
from pillion.gateway.planning.cluster_view import ClusterView
from pillion.gateway.request import request_machine
from pillion.records.bundle import Bundle
from pillion.records.explanation import Wait, end_ms, phases, sentences
from tests.gateway.recorder.test_recorder import PROMPT, ask, recorded, recording
from tests.support.fake_components import FakeCluster, knows

# Delay of the blocked stage, some sixty times everything else.
HELD_S = 1.5


def told(bundle: Bundle, *parts: str) -> str:
    """Return the sentence that contains all these parts."""
    found = [one for one in sentences(bundle) if all(part in one for part in parts)]
    assert len(found) == 1, sentences(bundle)
    return found[0]


def names(bundle: Bundle) -> list[str]:
    found = phases(bundle)
    assert (found[0].start_ms, found[-1].end_ms) == (0.0, end_ms(bundle))
    return [one.name for one in found]


@contextlib.asynccontextmanager
async def explained(folder: pathlib.Path, **flags: Any) -> AsyncIterator[FakeCluster]:
    async with recording(folder, record_share=1.0, **flags) as fakes:
        yield fakes


async def held(gate: asyncio.Event, what: str, is_held: Any, asked: Any) -> None:
    """Close a gate for HELD_S while a request waits at it."""
    gate.clear()
    asking = asyncio.create_task(asked)
    await until(what, is_held)
    await asyncio.sleep(HELD_S)
    gate.set()
    await asking


async def test_a_queue_at_the_gateway(tmp_path: pathlib.Path) -> None:
    async with explained(tmp_path, max_running_requests=1) as fakes:
        admission = fakes.gateway.gateway.admission
        fakes.decode.gate.clear()
        first = asyncio.create_task(ask(fakes))
        await until("a stream", lambda: fakes.decode.submits)
        second = asyncio.create_task(ask(fakes, "0 and more"))
        await until("one in line", lambda: admission.waiting == 1)
        third = asyncio.create_task(ask(fakes, "1 and more"))
        await until("two in line", lambda: admission.waiting == 2)
        await asyncio.sleep(HELD_S)
        fakes.decode.go_on()
        await asyncio.gather(first, second, third)
        bundles = await recorded(tmp_path, 3)
    told(bundles[1], "waiting in the gateway's queue, while 1 answer ran.")
    told(bundles[2], "waiting in the gateway's queue, while 1 answer ran and 1 request were waiting too.")
    assert Wait.LINE not in names(bundles[0])
    assert Wait.LINE in names(bundles[1])


async def test_a_cold_prefix_and_one_that_was_evicted(tmp_path: pathlib.Path) -> None:
    async with explained(tmp_path) as fakes:
        await ask(fakes)
        fakes.node.pinned = 3
        await ask(fakes)
        fakes.node.pinned, fakes.node.brings = 1, [1]
        knows(fakes, kv_0=4)
        await ask(fakes)
        cold, warm, evicted = await recorded(tmp_path, 3)
    told(cold, "The prefix was cold: none of the prompt's 30 tokens was cached.")
    told(warm, "Of the prompt's 30 tokens 12 were cached (12 were in the pool).")
    told(evicted, "The index had promised 16 cached tokens, and 4 were found.")


@pytest.mark.usefixtures("own_cache")
async def test_an_adapter_that_changed(tmp_path: pathlib.Path) -> None:
    model, first = recorded_model(tmp_path / "made")
    second = random_adapter_folder(load_config(model), tmp_path / "made" / "second", 2, 4)
    lora = {"enable_lora": True, "allow_runtime_lora_updating": True, "lora_path": (str(tmp_path / "made"),)}
    records = tmp_path / "records"
    async with explained(records, config=model / "config.json", **lora) as fakes:
        digests = []
        for folder, prompts in ((first, (PROMPT, PROMPT)), (second, ("Another prompt.", PROMPT, PROMPT))):
            digests.append((await fakes.client.load_adapter("red", str(folder), in_place=True)).adapter)
            for prompt in prompts:
                await ask(fakes, prompt, model="red")
        await fakes.client.load_adapter("blue", str(first))
        for model_name in ("blue", "toy"):
            await ask(fakes, model=model_name)
        found = await recorded(records, 7)
    changed = [bundle for bundle in found if any("This gateway last served" in one for one in sentences(bundle))]
    assert changed == [found[3]]
    then = f"({digests[0][:10]} then, {digests[1][:10]} now), and KV of one adapter does not serve another."
    told(
        found[3],
        "This gateway last served its first 4 tokens at ",
        f" with another adapter of the name red {then}",
    )


async def test_a_slow_link(tmp_path: pathlib.Path) -> None:
    async with recording(tmp_path, record_share=1.0, roles="kvnode prefill decode far-kvnode") as fakes:
        knows(fakes, kv_1=5)
        await held(fakes.node.fetch_gate, "a fetch", lambda: fakes.node.fetching, ask(fakes))
        (bundle,) = await recorded(tmp_path)
    told(bundle, "fetching KV to kv-0 from kv-1")
    told(bundle, "20 came from other nodes")
    assert Wait.FETCHING in names(bundle)


async def test_a_slow_prefill_worker(tmp_path: pathlib.Path) -> None:
    async with explained(tmp_path) as fakes:
        await held(fakes.prefill.gate, "a prefill range", lambda: fakes.prefill.running, ask(fakes))
        (bundle,) = await recorded(tmp_path)
    # The last chunk's acknowledgement may come after the answer's end.
    told(bundle, "prefilling at prefill-0:", "chunks waited", "ms to compute")
    told(bundle, "The split at 28 was expected to")
    told(bundle, "The plan expected the first token", "the longest part of that was prefilling at prefill-0")
    assert Wait.PREFILL in names(bundle)


async def test_a_dead_decode_worker(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_machine, "MAX_RETRY_DELAY_MS", request_machine.FIRST_RETRY_DELAY_MS)
    async with explained(tmp_path) as fakes:
        fakes.decode.break_after = 5
        await ask(fakes)
        (bundle,) = await recorded(tmp_path)
    told(bundle, "attempt 1 was lost at decode-0 (", "and the request moved")
    told(bundle, "The longest pause of the answer", "when decode-0 was lost")
    assert Wait.MOVING in names(bundle)
    assert names(bundle)[-1] == Wait.TOKENS
    assert len(fakes.decode.submits) == 2
    assert bundle.timings.replays == 1


async def test_a_paused_decode_worker(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def last_stall(view: ClusterView, component_id: str, now: float) -> tuple[float, float] | None:
        return (now - HELD_S, now) if component_id == "decode-0" else None

    monkeypatch.setattr(ClusterView, "last_stall", last_stall)
    async with explained(tmp_path) as fakes:
        await held(fakes.decode.gate, "a stream", lambda: fakes.decode.submits, ask(fakes))
        (bundle,) = await recorded(tmp_path)
    told(bundle, "decode-0 sent no heartbeat for 1.50 s: it was stopped")
    told(bundle, "were spent waiting in the queue of decode-0, where 0 answers ran")


async def test_a_grammar_that_takes_long_to_compile(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = GrammarChecker.check

    async def slow(checker: GrammarChecker, *arguments: Any) -> None:
        await asyncio.sleep(HELD_S)
        await check(checker, *arguments)

    monkeypatch.setattr(GrammarChecker, "check", slow)
    async with explained(tmp_path, record_content="full") as fakes:
        await ask(fakes, PROMPT, structured_outputs=StructuredOutputs(regex="[A-Z].*"))
        (bundle,) = await recorded(tmp_path)
    told(bundle, "making and compiling the grammar")
    assert Wait.GRAMMAR in names(bundle)
    assert bundle.request.grammar
