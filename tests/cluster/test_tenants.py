"""Two tenants never share a block of the real pool, a group does; and malformed requests leave the pool whole."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import random
import tempfile
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest
import pytest_asyncio

from lab.testbed.conditions import until
from lab.testbed.tiny_model import save_model
from pillion import AsyncClient
from pillion.gateway.admission.api_keys import hash_of
from pillion.gateway.links.decode_link import DecodeDelta, DecodeLink
from pillion.net.rpc import open_channel
from pillion.v1.decode_pb2 import Submit
from tests.gateway.http_api.test_http_fuzz import BODIES, KINDS, PATHS
from tests.support.components import Components, running_components
from tests.support.fuzz import malformed, send
from tests.support.http import call

KEYS = {name: f"plk-{name}-" + name[0] * 40 for name in ("red", "blue", "left", "right")}
TENANTS = '[tenant.red]\n[tenant.blue]\n[tenant.left]\ncache_group = "hands"\n[tenant.right]\ncache_group = "hands"\n'
PROMPT = list(range(2, 91))
BLOCK = 16
WHOLE = (len(PROMPT) - 1) // BLOCK * BLOCK
FUZZ = int(os.environ.get("PILLION_FUZZ", "120"))
AT_ONCE = 4
FLOOD_TOKENS = 100
FUZZ_TIMEOUT_S = 5.0
# A fuzzed request may be valid and ask for a long answer.
HARMLESS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}


def keys_file() -> str:
    entries = (f'[[key]]\ntenant = "{name}"\nhash = "{hash_of(key)}"\n' for name, key in KEYS.items())
    return TENANTS + "".join(entries)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def components(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Components]:
    folder = tmp_path_factory.mktemp("tenants")
    model = {"model": str(save_model(folder / "tiny")), "dtype": "float32", "max_model_len": 512, "block_size": BLOCK}
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        async with running_components(pathlib.Path(name), model=model, gateway={"chunk_size": 32}) as running:
            yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(components: Components, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """Run a second gateway with the tenants' keys; yield its gRPC address."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(keys_file())
    async with components.another_gateway_address(chunk_size=32, api_keys=str(path)) as address:
        yield address


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def cached(client: AsyncClient, **options: Any) -> int:
    """Return how many tokens of the prompt were cached."""
    deltas = [
        delta async for delta in client.generate(PROMPT, max_tokens=2, ignore_eos=True, temperature=0.0, **options)
    ]
    return deltas[-1].usage.cached_tokens


def blocks(components: Components) -> int:
    return components.kvnode.pool.status().committed_blocks


async def test_two_tenants_never_share_a_block(components: Components, guarded: str) -> None:
    one = {name: AsyncClient(guarded, api_key=key) for name, key in KEYS.items()}
    try:
        await until("the first gateway to know the model", one["red"].models)
        before = blocks(components)
        assert await cached(one["red"]) == 0
        assert await cached(one["red"]) == WHOLE
        await until("the blocks to be committed", lambda: blocks(components) - before >= WHOLE // BLOCK)
        mine = blocks(components) - before
        for salt in ("", "tenant:3:red:", "red", "group:5:hands:"):
            assert await cached(one["blue"], cache_salt=salt) == 0, salt
        await until("every tenant's own blocks", lambda: blocks(components) - before == 5 * mine)
        assert await cached(one["blue"]) == WHOLE
        for salt in ("", "tenant:3:red:"):
            assert await cached(components.client, cache_salt=salt) == 0
    finally:
        for client in one.values():
            await client.close()
    await components.proven()


async def test_a_tenant_group_shares_blocks_and_a_salt_separates_them(components: Components, guarded: str) -> None:
    async with AsyncClient(guarded, api_key=KEYS["left"]) as left, AsyncClient(guarded, api_key=KEYS["right"]) as right:
        await until("the gateway that is left to know the model", left.models)
        assert await cached(left) == 0
        assert await cached(right) == WHOLE
        assert await cached(left, cache_salt="mine") == 0
        assert await cached(left, cache_salt="mine") == WHOLE
        assert await cached(right) == WHOLE
    await components.proven()


def told_by_workers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """What a worker tells of all streams from now on, in its order: the most tokens of an answer, and whether it is
    the answer's end."""
    told: list[tuple[int, bool]] = []
    before = DecodeLink.submit

    def submit(link: DecodeLink, asked: Submit, sinks: Sequence[Any]) -> tuple[int, ...]:
        def noting(sink: Any) -> Any:
            def note(delta: DecodeDelta) -> None:
                told.append((asked.max_tokens, delta.finish_reason is not None))
                sink(delta)

            return note

        return before(link, asked, [noting(sink) for sink in sinks])

    monkeypatch.setattr(DecodeLink, "submit", submit)
    return told


async def test_a_lone_request_does_not_wait_for_answers_of_a_flood(
    components: Components, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers are counted: there are two places, slots for eighteen, and twenty-four answers of the flood before it."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(keys_file())
    folder = tempfile.TemporaryDirectory(prefix="pil-")
    flags = {"decode": {"max_num_seqs": 2}, "gateway": {"chunk_size": 32, "api_keys": str(path)}}
    with folder as name:
        async with running_components(pathlib.Path(name), model=components.model, **flags) as running:
            target = running.gateway.grpc_address
            async with (
                AsyncClient(target, api_key=KEYS["red"]) as red,
                AsyncClient(target, api_key=KEYS["blue"]) as blue,
            ):
                told = told_by_workers(monkeypatch)

                async def flood(number: int) -> None:
                    async for _ in red.generate([number + 2, *PROMPT], max_tokens=FLOOD_TOKENS, ignore_eos=True):
                        begun.add(number)

                begun: set[int] = set()
                tasks = [asyncio.create_task(flood(number)) for number in range(24)]
                await until("two answers to begin", lambda: len(begun) == 2)
                for number in range(3):
                    told.clear()
                    stream = blue.generate([*PROMPT, number + 2], max_tokens=2, ignore_eos=True)
                    assert sum([len(delta.token_ids) async for delta in stream]) == 2
                    # A slow reader gets both tokens in one message.
                    waited = told[[most for most, _ in told].index(2) : told.index((2, True))]
                    # Two answers may end at once before the worker's next scheduling.
                    assert waited.count((FLOOD_TOKENS, True)) <= 4, f"request {number} waited for answers of the flood"
                await asyncio.gather(*tasks)
            await running.proven()


async def test_malformed_requests_change_nothing(components: Components) -> None:
    draw = random.Random(7)
    async with open_channel(components.gateway.grpc_address) as channel:

        async def one() -> None:
            if draw.random() < 0.5:
                name, raw = malformed(draw)
                code = await send(channel, name, raw, FUZZ_TIMEOUT_S)
                assert code in HARMLESS, (code, name, raw)
                return
            path = draw.choice(PATHS)
            valid = json.loads(json.dumps({**BODIES[path], "model": "tiny"}))
            body = draw.choice(KINDS)(draw, valid)
            reply = await call(components.gateway.http_address, path, body)
            assert reply.status in (200, 400, 404, 429), (reply, body)

        async def several(count: int) -> None:
            for _ in range(count):
                await one()

        await asyncio.gather(*(several(FUZZ // AT_ONCE) for _ in range(AT_ONCE)))
    await components.proven()
    for worker in (components.prefill, components.decode):
        # A worker may learn of a request's end after the node.
        epoch = worker.worker.epoch
        await until("the worker to forget all sequences", lambda epoch=epoch: not epoch.listeners)
    assert {component.role for component in (await components.client.status()).components} == {
        "kvnode",
        "prefill",
        "decode",
        "gateway",
    }
    await cached(components.client, cache_salt="afterwards")
    assert await cached(components.client, cache_salt="afterwards") == WHOLE
