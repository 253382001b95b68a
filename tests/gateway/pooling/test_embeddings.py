"""/v1/embeddings over real sockets with scripted peers: input forms, orders, invalid items, a lost worker."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import openai
import pytest

from lab.testbed.toy_tokenizer import byte_tokenizer
from pillion.gateway.admission.tenants import OPEN
from pillion.gateway.batches.batch_calls import LineCalls
from pillion.gateway.http_api.model_calls import ModelCalls
from pillion.gateway.pooling.pooling_pages import pooling_routes
from pillion.gateway.pooling.text_call import MAX_TEXTS
from pillion.gateway.pooling.vectors import GatewayVectors
from tests.support.fake_components import FakeCluster, running_fake_cluster, vector_of
from tests.support.http import Reply, call

PATH = "/v1/embeddings"
TEXTS = ["The sea", "x", "The land and the sea", "x"]


def ids_of(text: str) -> list[int]:
    found: list[int] = byte_tokenizer().encode(text).ids
    return found


async def embed(fakes: FakeCluster, inputs: Any, **fields: Any) -> Reply:
    return await call(fakes.gateway.http_address, PATH, {"input": inputs, **fields})


def unit(token_ids: list[int], dimensions: int | None = None) -> np.ndarray:
    """Return the gateway's vector for a text of these ids."""
    vector = vector_of(token_ids)[:dimensions].astype(np.float64)
    found: np.ndarray = vector / np.linalg.norm(vector)
    return found


@pytest.mark.parametrize(
    ("inputs", "ids"),
    [
        ("hi", [ids_of("hi")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (TEXTS, [ids_of(text) for text in TEXTS]),
    ],
    ids=["text", "ids", "lists of ids", "texts"],
)
@pytest.mark.parametrize("dimensions", [None, 2])
async def test_every_form_of_input_is_embedded_in_order(
    inputs: Any, ids: list[list[int]], dimensions: int | None
) -> None:
    async with running_fake_cluster() as fakes:
        shape = {} if dimensions is None else {"dimensions": dimensions}
        reply = await embed(fakes, inputs, user="u", **shape)
        assert (reply.status, reply.json["object"], reply.json["model"]) == (200, "list", "toy")
        data = reply.json["data"]
        assert [(one["object"], one["index"]) for one in data] == [("embedding", n) for n in range(len(ids))]
        for one, tokens in zip(data, ids, strict=True):
            assert one["embedding"] == pytest.approx(unit(tokens, dimensions), abs=1e-6)
        total = sum(map(len, ids))
        assert (reply.json["usage"]["prompt_tokens"], reply.json["usage"]["total_tokens"]) == (total, total)
        packed = await embed(fakes, inputs, encoding_format="base64", **shape)
        for one, plain in zip(packed.json["data"], data, strict=True):
            read = np.frombuffer(base64.b64decode(one["embedding"]), "<f4")
            assert read.tolist() == np.array(plain["embedding"], np.float32).tolist()
        assert all(submit.pooled and submit.max_tokens == 0 for submit in fakes.decode.submits)
        await fakes.settled()


async def test_openais_client_reads_the_vectors() -> None:
    async with (
        running_fake_cluster() as fakes,
        openai.AsyncOpenAI(base_url=f"http://{fakes.gateway.http_address}/v1", api_key="none") as client,
    ):
        found = await client.embeddings.create(model="toy", input=TEXTS)
        assert [one.embedding for one in found.data] == [pytest.approx(unit(ids_of(text)), abs=1e-6) for text in TEXTS]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ["x", "", "y"]}, "input[1]"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[5], [6, 99_999]]}, "input[1][1]"),
        ({"input": [5, 99_999]}, "input[1]"),
        ({"input": ["x", "y" * 100_000]}, "input[1]"),
        ({"input": ["x", 5]}, "input[1]"),
        ({"input": ["x"] * (MAX_TEXTS + 1)}, "input"),
        ({"input": [[5]] * (MAX_TEXTS + 1)}, "input"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "dimensions": 5}, "dimensions"),
        ({"input": "x", "prompt_name": "query"}, "prompt_name"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "x", "truncate_prompt_tokens": 100_000}, "truncate_prompt_tokens"),
        ({"input": "x", "normalize": True}, "normalize"),
        ({}, "input"),
    ],
    ids=lambda one: str(one)[:40],
)
async def test_a_wrong_field_is_named_with_its_items_index(body: dict[str, Any], param: str) -> None:
    async with running_fake_cluster() as fakes:
        reply = await call(fakes.gateway.http_address, PATH, body)
        assert (reply.status, reply.error["param"]) == (400, param)
        await fakes.settled()


async def test_a_lost_worker_is_replayed_and_every_text_answered_once() -> None:
    async with running_fake_cluster() as fakes:
        lost: list[tuple[int, ...]] = []

        def is_killed_by(submit: Any) -> bool:
            tokens = tuple(submit.token_ids)
            if tokens != tuple(ids_of("x")) or lost:
                return False
            lost.append(tokens)
            return True

        fakes.decode.is_killed_by = is_killed_by
        reply = await embed(fakes, TEXTS)
        assert lost
        assert [one["embedding"] for one in reply.json["data"]] == [
            pytest.approx(unit(ids_of(text)), abs=1e-6) for text in TEXTS
        ]
        assert max(submit.attempt for submit in fakes.decode.submits) > 1
        assert {tuple(submit.token_ids) for submit in fakes.decode.submits} == {tuple(ids_of(text)) for text in TEXTS}
        await fakes.settled()


async def test_a_worker_without_embeddings_is_named_as_the_reason() -> None:
    async with running_fake_cluster() as fakes:
        fakes.decode.knows_vectors = False
        reply = await embed(fakes, ["x", "y"])
        assert (reply.status, reply.error["message"]) == (500, "a worker of an older version returned no vector")
        await fakes.settled()


async def test_a_batch_line_may_be_an_embeddings_call() -> None:
    async with running_fake_cluster() as fakes:
        lines = LineCalls()
        lines.register(pooling_routes(ModelCalls(fakes.gateway.gateway), GatewayVectors(fakes.gateway.gateway)))
        assert PATH in lines.urls
        reply = await lines.serve(PATH, json.dumps({"input": ["hi"]}).encode(), OPEN, "line-1")
        assert reply.status == 200
        (found,) = json.loads(reply.body)["data"]
        assert found["embedding"] == pytest.approx(unit(ids_of("hi")), abs=1e-6)


async def test_the_chat_template_makes_the_text_of_messages() -> None:
    """One vector of the rendered conversation, as vLLM's embeddings API."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
    ]
    text = "<bos>[system] Be brief.\n[user] x\n"
    async with running_fake_cluster() as fakes:
        address = fakes.gateway.http_address
        for fields, rendered in (
            ({}, text),
            ({"add_generation_prompt": True}, f"{text}[assistant] "),
            ({"chat_template_kwargs": {"n": 1}}, text),
            ({"truncate_prompt_tokens": 9}, ids_of(text)[:9]),
        ):
            reply = await call(address, PATH, {"messages": messages, **fields})
            (one,) = reply.json["data"]
            ids = ids_of(rendered) if isinstance(rendered, str) else rendered
            assert one["embedding"] == pytest.approx(unit(ids), abs=1e-6), fields
            assert reply.json["usage"]["prompt_tokens"] == len(ids)
        for wrong, param in (
            ({}, "input"),
            ({"input": "x", "messages": messages}, "input"),
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "a role", "content": "x"}]}, "messages[0].role"),
            ({"messages": [{"role": "user", "content": "x" * 1000}]}, "messages"),
        ):
            refused = await call(address, PATH, wrong)
            assert (refused.status, refused.error["param"]) == (400, param), wrong
        await fakes.settled()
