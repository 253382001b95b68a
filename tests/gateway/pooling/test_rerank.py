"""/rerank and /score over real sockets with scripted peers: the forms of vLLM, Jina and Cohere, and invalid fields."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from lab.testbed.toy_tokenizer import byte_tokenizer
from pillion.gateway.admission.tenants import OPEN
from pillion.gateway.batches.batch_calls import LineCalls
from pillion.gateway.http_api.model_calls import ModelCalls
from pillion.gateway.pooling.pooling_pages import pooling_routes
from pillion.gateway.pooling.rerank_forms import SCORED_FIELDS
from pillion.gateway.pooling.text_call import MAX_TEXTS
from pillion.gateway.pooling.vectors import GatewayVectors
from tests.support.fake_components import FakeCluster, running_fake_cluster, vector_of
from tests.support.http import Reply, call

QUERY = "What is blue?"
TEXTS = ["The land", "The sea", "x", "A grey cat sat"]


def ids_of(text: str) -> list[int]:
    found: list[int] = byte_tokenizer().encode(text).ids
    return found


def cosine(one: str, other: str) -> float:
    """Return the cosine of two texts' vectors, by numpy."""
    left, right = (vector_of(ids_of(text)).astype(np.float64) for text in (one, other))
    return float(left @ right / np.linalg.norm(left) / np.linalg.norm(right))


async def ask(fakes: FakeCluster, path: str, **body: Any) -> Reply:
    return await call(fakes.gateway.http_address, path, body)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_reranked_documents_have_each_endpoints_format(path: str) -> None:
    async with running_fake_cluster() as fakes:
        scores = [cosine(QUERY, text) for text in TEXTS]
        order = sorted(range(len(TEXTS)), key=lambda n: -scores[n])
        documents = [TEXTS[0], {"text": TEXTS[1]}, *TEXTS[2:]]
        reply = await ask(fakes, path, query=QUERY, documents=documents, user="u")
        tokens = sum(len(ids_of(text)) for text in [QUERY, *TEXTS])
        assert (reply.status, reply.json.get("model")) == (200, "toy"), reply.json
        assert reply.json["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
        assert [one["index"] for one in reply.json["results"]] == order
        for one in reply.json["results"]:
            assert one["relevance_score"] == pytest.approx(scores[one["index"]], abs=1e-6)
            shown = {} if path == "/v2/rerank" else {"document": {"text": TEXTS[one["index"]]}}
            assert {**shown, "index": one["index"], "relevance_score": one["relevance_score"]} == one
        assert ("meta" in reply.json) is (path == "/v2/rerank")
        best = await ask(fakes, path, query=QUERY, documents=TEXTS, top_n=2, return_documents=path == "/v2/rerank")
        assert [one["index"] for one in best.json["results"]] == order[:2]
        assert all(("document" in one) is (path == "/v2/rerank") for one in best.json["results"])
        every = await ask(fakes, path, query=QUERY, documents=TEXTS, top_n=0)
        assert [one["index"] for one in every.json["results"]] == order
        await fakes.settled()


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_one_to_one_one_to_many_and_many_to_many_pairs_are_scored(path: str) -> None:
    async with running_fake_cluster() as fakes:
        for first, second in [(QUERY, "x"), (QUERY, TEXTS), ([QUERY], TEXTS), (TEXTS[::-1], TEXTS)]:
            reply = await ask(fakes, path, text_1=first, text_2=second)
            left = [first] if isinstance(first, str) else first
            right = [second] if isinstance(second, str) else second
            pairs = zip(left * len(right) if len(left) == 1 else left, right, strict=True)
            assert (reply.status, reply.json["object"]) == (200, "list")
            assert [(one["index"], one["object"]) for one in reply.json["data"]] == [
                (n, "score") for n in range(len(right))
            ]
            for one, pair in zip(reply.json["data"], pairs, strict=True):
                assert one["score"] == pytest.approx(cosine(*pair), abs=1e-6)
            assert reply.json["usage"]["prompt_tokens"] == sum(len(ids_of(text)) for text in {*left, *right})
        await fakes.settled()


@pytest.mark.parametrize("one", SCORED_FIELDS)
async def test_pairs_are_accepted_under_all_vllm_names(one: tuple[str, str]) -> None:
    first, second = one
    async with running_fake_cluster() as fakes:
        reply = await ask(fakes, "/score", **{first: QUERY, second: TEXTS})
        scores = [found["score"] for found in reply.json["data"]]
        assert scores == [pytest.approx(cosine(QUERY, text), abs=1e-6) for text in TEXTS]
        wrong = await ask(fakes, "/score", **{first: QUERY, second: ["x", ""]})
        assert (wrong.status, wrong.error["param"]) == (400, f"{second}[1]")
        both = {first: "x", second: "y"}
        other = "text_1" if first != "text_1" else "data_1"
        for body, param in (({second: "x"}, first), ({}, "text_1"), (both | {other: "z"}, other)):
            alone = await ask(fakes, "/score", **body)
            assert (alone.status, alone.error["param"]) == (400, param)
            assert "queries and documents" in alone.error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "", "documents": ["x"]}, "query"),
        ("/v1/rerank", {"documents": ["x"]}, "query"),
        ("/v1/rerank", {"query": "q"}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": ["x", ""]}, "documents[1]"),
        ("/v1/rerank", {"query": "q", "documents": ["x", {"text": ""}]}, "documents[1]"),
        ("/v1/rerank", {"query": "q", "documents": ["x", {"image": "y"}]}, "documents[1].text"),
        ("/v1/rerank", {"query": "q", "documents": ["x", "y" * 100_000]}, "documents[1]"),
        ("/v1/rerank", {"query": "y" * 100_000, "documents": ["x"]}, "query"),
        ("/v1/rerank", {"query": "q", "documents": ["x"] * (MAX_TEXTS + 1)}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": ["x"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "q", "documents": ["x"], "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ("/v1/rerank", {"query": "q", "documents": ["x"], "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ("/v1/rerank", {"query": "q", "documents": ["x"], "instruction": "find"}, "instruction"),
        ("/v1/rerank", {"query": "q", "documents": ["x"], "rank_fields": ["a"]}, "rank_fields"),
        ("/v1/score", {"text_1": "q", "text_2": ["x", ""]}, "text_2[1]"),
        ("/v1/score", {"text_1": ["q", "r"], "text_2": "x"}, "text_1"),
        ("/v1/score", {"text_1": ["q", "r" * 100_000], "text_2": ["x", "y"]}, "text_1[1]"),
        ("/v1/score", {"text_1": [["q"]], "text_2": ["x"]}, "text_1[0]"),
        ("/v1/score", {"text_2": "x"}, "text_1"),
    ],
    ids=lambda one: str(one)[:60],
)
async def test_a_wrong_field_is_named_by_the_clients_name(path: str, body: dict[str, Any], param: str) -> None:
    async with running_fake_cluster() as fakes:
        reply = await call(fakes.gateway.http_address, path, body)
        assert (reply.status, reply.error["param"]) == (400, param)
        assert not fakes.decode.submits
        await fakes.settled()


async def test_texts_are_truncated_as_requested() -> None:
    async with running_fake_cluster() as fakes:
        body = {"query": "What", "documents": ["The sea", "x"]}
        reply = await ask(fakes, "/v1/rerank", **body, truncate_prompt_tokens=5)
        scores = {one["index"]: one["relevance_score"] for one in reply.json["results"]}
        assert scores == {0: pytest.approx(cosine("What", "The s")), 1: pytest.approx(cosine("What", "x"))}
        reply = await ask(fakes, "/v1/rerank", **body, max_tokens_per_doc=3)
        scores = {one["index"]: one["relevance_score"] for one in reply.json["results"]}
        assert scores == {0: pytest.approx(cosine("What", "The")), 1: pytest.approx(cosine("What", "x"))}
        # -1 truncates to the model's context, which exceeds the other texts but not this one.
        whole = await ask(fakes, "/v1/rerank", query="What", documents=["y" * 100_000], truncate_prompt_tokens=-1)
        most = fakes.gateway.gateway.entry("toy").limits.max_prompt_tokens
        assert whole.json["usage"]["prompt_tokens"] == 4 + most
        await fakes.settled()


async def test_batch_lines_may_be_rerank_calls() -> None:
    async with running_fake_cluster() as fakes:
        lines = LineCalls()
        lines.register(pooling_routes(ModelCalls(fakes.gateway.gateway), GatewayVectors(fakes.gateway.gateway)))
        assert {"/v1/classify", "/v1/embeddings", "/v1/rerank", "/v1/score"} < set(lines.urls)
        body = json.dumps({"text_1": QUERY, "text_2": "x"}).encode()
        reply = await lines.serve("/v1/score", body, OPEN, "line-1")
        assert json.loads(reply.body)["data"][0]["score"] == pytest.approx(cosine(QUERY, "x"), abs=1e-6)
