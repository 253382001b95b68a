"""Embed and Score over real gRPC with scripted peers, by both clients; invalid texts, a deadline, a cancelled call."""

from __future__ import annotations

import asyncio
import pathlib

import numpy as np
import pytest

from lab.testbed.conditions import until
from pillion import Client, DeadlineExceeded, InvalidRequest, Overloaded
from pillion.gateway.pooling.text_call import MAX_STEPS_AT_ONCE, MAX_TEXTS, MAX_TEXTS_AT_ONCE
from pillion.v1 import gateway_pb2
from tests.gateway.pooling.test_rerank import QUERY, TEXTS, cosine, ids_of
from tests.gateway.test_protection import client_of, running_with, write_keys
from tests.support.fake_components import FINGERPRINT, record, running_fake_cluster, vector_of


def unit(token_ids: list[int], dimensions: int | None = None) -> list[float]:
    """Return the gateway's vector for a text of these ids."""
    vector = vector_of(token_ids)[:dimensions].astype(np.float64)
    found: list[float] = (vector / np.linalg.norm(vector)).tolist()
    return found


async def test_both_clients_read_vectors_and_scores() -> None:
    async with running_fake_cluster() as fakes:
        mixed = ["The sea", [5, 6, 7]]
        with Client(fakes.gateway.grpc_address) as blocking:
            found = await fakes.client.embed(mixed)
            also = await asyncio.to_thread(blocking.embed, mixed)
            assert [one.prompt_token_ids for one in found] == [ids_of("The sea"), [5, 6, 7]]
            assert [one.outputs.embedding for one in found] == [
                pytest.approx(unit(one.prompt_token_ids), abs=1e-6) for one in found
            ]
            assert also == found
            scores = await fakes.client.score(QUERY, TEXTS)
            assert [one.outputs.score for one in scores] == [pytest.approx(cosine(QUERY, text)) for text in TEXTS]
            assert await asyncio.to_thread(blocking.score, QUERY, TEXTS) == scores
        (short,) = await fakes.client.embed([5, 6, 7], dimensions=2)
        assert short.outputs.embedding == pytest.approx(unit([5, 6, 7], 2), abs=1e-6)
        (cut,) = await fakes.client.embed("The sea", truncate_prompt_tokens=3)
        assert cut.prompt_token_ids == ids_of("The")
        (pair,) = await fakes.client.score("What", "The sea", max_tokens_per_doc=3)
        assert pair.outputs.score == pytest.approx(cosine("What", "The"))
        await fakes.settled()


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (gateway_pb2.EmbedRequest(), "inputs"),
        (gateway_pb2.EmbedRequest(inputs=[{"text": "x"}, {}]), "inputs[1]"),
        (gateway_pb2.EmbedRequest(inputs=[{"text": "x", "token_ids": [1]}]), "inputs[0]"),
        (gateway_pb2.EmbedRequest(inputs=[{"text": "x"}] * (MAX_TEXTS + 1)), "inputs"),
        (gateway_pb2.EmbedRequest(inputs=[{"text": "x"}, {"token_ids": [5, 99_999]}]), "inputs[1][1]"),
        (gateway_pb2.EmbedRequest(inputs=[{"text": "x"}, {"text": "y" * 100_000}]), "inputs[1]"),
        (gateway_pb2.EmbedRequest(inputs=[{"text": "x"}], prompt_name="p"), "prompt_name"),
        (gateway_pb2.EmbedRequest(inputs=[{"text": "x"}], truncate_prompt_tokens=0), "truncate_prompt_tokens"),
        (gateway_pb2.ScoreRequest(queries=["q"]), "documents"),
        (gateway_pb2.ScoreRequest(documents=["d"]), "queries"),
        (gateway_pb2.ScoreRequest(queries=["q"] * 2, documents=["d"] * 3), "queries"),
        (gateway_pb2.ScoreRequest(queries=["q"], documents=["d", ""]), "documents[1]"),
        (gateway_pb2.ScoreRequest(queries=["q"], documents=["d", "y" * 100_000]), "inputs[1].document"),
    ],
    ids=lambda one: one if isinstance(one, str) else str(one)[:40],
)
async def test_a_wrong_text_is_named_before_any_is_computed(message: object, field: str) -> None:
    async with running_fake_cluster() as fakes:
        name = "Embed" if isinstance(message, gateway_pb2.EmbedRequest) else "Score"
        with pytest.raises(InvalidRequest) as raised:
            await fakes.client._unary(name, message)
        assert [one.field for one in raised.value.violations] == [field]
        assert not fakes.decode.submits
        await fakes.settled()


async def test_concurrent_texts_of_a_list_are_bounded_and_cancelled_with_it() -> None:
    async with running_fake_cluster() as fakes:
        fakes.decode.gate.clear()
        work = asyncio.create_task(fakes.client.embed([[5, 6, 1 + n % 200] for n in range(MAX_TEXTS)]))
        await until("texts to be under way", lambda: len(fakes.decode.streams) == MAX_TEXTS_AT_ONCE)
        work.cancel()
        await until("these texts to be cancelled", lambda: len(fakes.decode.cancelled) == MAX_TEXTS_AT_ONCE)
        fakes.decode.go_on()
        await fakes.settled()
        assert fakes.decode.most_streams == MAX_TEXTS_AT_ONCE
        assert len(fakes.decode.submits) == MAX_TEXTS_AT_ONCE


async def test_a_lists_texts_obey_the_limits_of_gateway_and_tenant(tmp_path: pathlib.Path) -> None:
    tenants = "[tenant.acme]\nmax_inflight_requests = 3\n[tenant.small]\nrequests_per_minute = 4\n[tenant.friend]\n"
    file = write_keys(tmp_path / "keys.toml", tenants, ["acme", "small", "friend"])
    texts = [[5, 6, n] for n in range(1, 9)]
    async with running_with(file) as fakes:
        async with client_of(fakes, "acme") as client:
            assert [one.prompt_token_ids for one in await client.embed(texts)] == texts
            assert fakes.decode.most_streams <= 3
        async with client_of(fakes, "small") as client:
            # Each text counts as a request, and a list that exceeds a quota costs nothing.
            with pytest.raises(InvalidRequest, match=r"inputs\[4\]: the call has 8 prompts"):
                await client.embed(texts)
            await client.embed(texts[:3])
            for _ in range(3):
                with pytest.raises(Overloaded) as caught:
                    await client.embed(texts[:2])
                assert [quota.subject for quota in caught.value.quotas] == ["small/requests_per_minute"]
            await client.embed(texts[:1])
            with pytest.raises(Overloaded):
                await client.score("x", "y")
        await fakes.settled()
    async with running_fake_cluster(max_inflight_requests=2, max_inflight_tokens=70) as fakes:
        assert [one.prompt_token_ids for one in await fakes.client.embed(texts)] == texts
        long = [[5] * 30, [6] * 40, [7] * 69]
        assert [one.prompt_token_ids for one in await fakes.client.embed(long)] == long
        await fakes.settled()


@pytest.mark.parametrize("workers", ["decode-0", "decode-0 decode-1"])
async def test_long_texts_in_flight_are_limited_to_a_few_steps(workers: str) -> None:
    async with running_fake_cluster() as fakes:
        cluster, names = fakes.gateway.cluster, workers.split()
        for name in names:
            await fakes.registry.heartbeat(
                record(name, "decode", f"unix:{fakes.folder}/decode.sock", max_step_tokens=20)
            )
        served = cluster.served("toy", FINGERPRINT)
        await until("the workers' steps to be known", lambda: cluster.text_step_tokens(served) == 20 * len(names))
        fakes.decode.gate.clear()
        texts = [[5, n] * 10 for n in range(1, 20)]
        work = asyncio.create_task(fakes.client.embed([*texts, [6] * 60]))
        few = MAX_STEPS_AT_ONCE * len(names)
        await until("texts to be under way", lambda: len(fakes.decode.streams) == few)
        fakes.decode.go_on()
        assert [one.prompt_token_ids for one in await work] == [*texts, [6] * 60]
        assert fakes.decode.most_streams == few
        await fakes.settled()


async def test_the_deadline_covers_all_texts() -> None:
    async with running_fake_cluster() as fakes:
        fakes.decode.gate.clear()
        with pytest.raises(DeadlineExceeded):
            await fakes.client.embed([[5, n] for n in range(2 * MAX_TEXTS_AT_ONCE)], timeout_s=1.0)
        await until("the texts to be cancelled", lambda: not fakes.gateway.gateway.active_requests)
        # Texts due after the deadline were never sent; nor, on a busy machine, some before it.
        assert len(fakes.decode.submits) <= MAX_TEXTS_AT_ONCE
        fakes.decode.go_on()
        await fakes.settled()


async def test_priority_and_salt_apply_to_every_text() -> None:
    async with running_fake_cluster() as fakes:
        await fakes.client.embed([[5, 6], [7]], priority=7, cache_salt="one")
        await fakes.client.score("q", ["d", "e"], priority=7, cache_salt="two")
        assert {submit.priority for submit in fakes.decode.submits} == {7}
        roots = [submit.root_hash for submit in fakes.decode.submits]
        assert len(set(roots[:2])) == len(set(roots[2:])) == 1
        assert roots[0] != roots[2]
        await fakes.settled()


async def test_a_document_waits_for_the_first_one_with_a_shared_prefix() -> None:
    """Shared whole blocks of BLOCK tokens, as the pairs of a reranker share a query."""
    async with running_fake_cluster() as fakes:
        fakes.decode.gate.clear()
        shared = list(range(1, 33))
        texts = [[*shared, 40 + n] for n in range(4)] + [[200, 201]]
        work = asyncio.create_task(fakes.client.embed(texts))
        await until("what waits for nobody to be under way", lambda: len(fakes.decode.submits) == 2)
        assert sorted(len(submit.token_ids) for submit in fakes.decode.submits) == [2, 33]
        fakes.decode.go_on()
        assert [one.prompt_token_ids for one in await work] == texts
        await fakes.settled()
