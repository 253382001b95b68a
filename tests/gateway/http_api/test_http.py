"""The HTTP port over real sockets, with scripted peers: pages, errors, ids, limits."""

from __future__ import annotations

import asyncio
import json
import pathlib
import re
import types

import openai
import pytest
import uvicorn.server

from lab.testbed.conditions import until
from pillion import errors
from pillion.errors import FieldViolation, InvalidRequest
from pillion.gateway.http_api.http_errors import from_pillion
from pillion.gateway.http_api.request_bodies import MAX_BODY_BYTES, MAX_SENT_BYTES
from tests.support.fake_components import FINGERPRINT, MAX_LEN, running_fake_cluster
from tests.support.http import call, connected, request_bytes, send

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "toy", "prompt": "hi"}


async def test_pages() -> None:
    async with running_fake_cluster() as fakes:
        address = fakes.gateway.http_address
        health, version = await call(address, "/health"), await call(address, "/version")
        assert (health.status, health.json) == (200, {"status": "ok"})
        assert version.json["version"]
        models = (await call(address, "/v1/models")).json
        model, other = models["data"]
        assert (models["object"], model["id"], model["object"], model["max_model_len"]) == (
            "list",
            "toy",
            "model",
            MAX_LEN,
        )
        assert (await call(address, "/v1/models/toy")).json == model
        # --model's value is a second name: accepted in requests, and listed with the real one as its root.
        assert other == model | {"id": "models/toy"}
        assert model["root"] == "toy"
        assert (await call(address, "/v1/models/models/toy")).json == other
        said = (await call(address, "/v1/completions", TEXT | {"model": "models/toy"})).json
        assert (said["model"], said["choices"][0]["text"]) == ("toy", "The answer.")
        for path in ("/v1/models/other", "/v1/models/a/b"):
            missing = await call(address, path)
            assert (missing.status, missing.error["code"]) == (404, "model_not_found")
        head = await call(address, "/health", method="HEAD")
        assert (head.status, head.body) == (200, b"")


# Paths of clients whose base URL lacks /v1 or has it twice.
NEAR = {
    "/v1/v1/chat/completions": "/v1/chat/completions",
    "/chat/completions": "/v1/chat/completions",
    "/v1/chat/completion": "/v1/chat/completions",
    "/completions": "/v1/completions",
    "/embeddings": "/v1/embeddings",
    "/v2/classify": "/v1/classify",
    "/v1/v1/messages": "/v1/messages",
    "/v1/message": "/v1/messages",
    "/messages": "/v1/messages",
    "/v1/v1/messages/count_tokens": "/v1/messages/count_tokens",
    "/v1/v1/responses": "/v1/responses",
    "/response": "/v1/responses",
    "/models": "/v1/models",
    "/v1/tokenize": "/tokenize",
}


async def test_auxiliary_endpoints_of_other_servers_are_served() -> None:
    async with running_fake_cluster() as fakes:
        address = fakes.gateway.http_address
        for method in ("GET", "POST"):
            pong = await call(address, "/ping", method=method)
            assert (pong.status, pong.json) == (200, {"status": "ok"})
        assert (await call(address, "/load")).json == {"server_load": 0}
        fakes.decode.gate.clear()
        asking = asyncio.create_task(call(address, "/v1/completions", TEXT | {"n": 2}))
        await until("the answers to be under way", lambda: fakes.decode.submits)
        assert (await call(address, "/load")).json == {"server_load": 2}
        fakes.decode.gate.set()
        assert (await asking).status == 200
        for path in ("/tokenizer_info", "/tokenizer_info?model=models/toy"):
            assert (await call(address, path)).json == {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": MAX_LEN,
                "vocab_size": 259,
                "add_bos_token": False,
                "bos_token": "<bos>",
                "eos_token": "<eos>",
            }
        missing = await call(address, "/tokenizer_info?model=other")
        assert (missing.status, missing.error["code"]) == (404, "model_not_found")
        await fakes.settled()


async def test_the_openapi_document_lists_the_returned_statuses() -> None:
    async with running_fake_cluster() as fakes:
        address = fakes.gateway.http_address
        paths = (await call(address, "/openapi.json")).json["paths"]
        foreign = {"Origin": "https://x.org", "Content-Type": "text/plain"}
        for path, described, body, headers in (
            ("/v1/chat/completions", "/v1/chat/completions", CHAT | {"n": 0}, None),
            ("/v1/chat/completions", "/v1/chat/completions", CHAT | {"model": "x"}, None),
            ("/v1/chat/completions", "/v1/chat/completions", CHAT, foreign),
            ("/ping", "/ping", {}, foreign),
            ("/v1/completions", "/v1/completions", TEXT, {"Content-Type": "text/csv"}),
            ("/v1/completions", "/v1/completions", TEXT, {"X-Long": "x" * 40_000}),
            ("/v1/models/x", "/v1/models/{name}", None, None),
            ("/tokenizer_info?model=x", "/tokenizer_info", None, None),
            ("/tokenizer_info?x=1", "/tokenizer_info", None, None),
        ):
            status = (await call(address, path, body, headers)).status
            method = "get" if body is None else "post"
            assert str(status) in paths[described][method]["responses"], (path, status)
            assert status != 200


async def test_a_header_names_the_ignored_fields() -> None:
    async with running_fake_cluster() as fakes:
        address = fakes.gateway.http_address
        for stream in (False, True):
            answer = await call(address, "/v1/chat/completions", CHAT | {"stream": stream, "shiny": [1], "user": "u"})
            assert (answer.status, answer.headers["x-pillion-ignored"]) == (200, "shiny, user")
        for path, body in (("/v1/completions", TEXT), ("/tokenize", TEXT), ("/v1/responses", {"input": "hi"})):
            answer = await call(address, path, body | {"shiny": {}})
            assert (answer.status, answer.headers["x-pillion-ignored"]) == (200, "shiny")
        counted = CHAT | {"betas": ["x"]}
        for path, more in (("/v1/messages/count_tokens", {}), ("/v1/messages", {"max_tokens": 5})):
            answer = await call(address, path, counted | more)
            assert (answer.status, answer.headers["x-pillion-ignored"]) == (200, "betas")
        assert "x-pillion-ignored" not in (await call(address, "/v1/chat/completions", CHAT)).headers
        refused = await call(address, "/v1/chat/completions", CHAT | {"temprature": 1})
        assert (refused.status, refused.error["param"]) == (400, "temprature")
        assert refused.error["message"] == "temprature: did you mean temperature?"
    async with running_fake_cluster(strict_fields=True) as fakes:
        refused = await call(fakes.gateway.http_address, "/v1/chat/completions", CHAT | {"shiny": 1})
        assert (refused.status, refused.error["code"]) == (400, "unknown_parameter")


async def test_sloppy_values_mean_the_same_at_every_api() -> None:
    """Seed -1 is random, top_p 0 is greedy, and a lone surrogate becomes U+FFFD."""
    said = {"model": None, "seed": -1, "top_p": 0, "max_tokens": 4.0, "x": 1}
    async with running_fake_cluster() as fakes:
        for path, more in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi \ud83d"}]}),
            ("/v1/completions", {"prompt": "hi \ud83d"}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "hi \ud83d"}]}),
            ("/v1/responses", {"input": "hi \ud83d"}),
        ):
            answer = await call(fakes.gateway.http_address, path, said | more)
            assert (answer.status, answer.headers["x-pillion-ignored"]) == (200, "x"), answer.body
            submit = fakes.decode.submits[-1]
            assert submit.max_tokens == 4
            assert (submit.sampling.top_p, submit.sampling.top_k) == (1.0, 1)
            assert submit.sampling.seed != -1
            tokens = {"tokens": list(submit.token_ids)}
            assert "hi \ufffd" in (await call(fakes.gateway.http_address, "/detokenize", tokens)).json["prompt"]
        await fakes.settled()


async def test_an_idle_port_stops_without_a_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uvicorn itself polls every 100 ms for its stop flag, and sleeps once more before it ends."""
    rests: list[float] = []

    async def rest(seconds: float) -> None:
        rests.append(seconds)
        await asyncio.sleep(seconds)

    async with running_fake_cluster() as fakes:
        address = fakes.gateway.http_address
        assert (await call(address, "/health")).status == 200
        await until("the connection's end", lambda: not fakes.gateway.http.connections)
        monkeypatch.setattr(uvicorn.server, "asyncio", types.SimpleNamespace(**vars(asyncio) | {"sleep": rest}))
        await fakes.gateway.http.stop(0.0)
        assert not rests
        with pytest.raises(ConnectionRefusedError):
            await call(address, "/health")


async def test_unknown_paths_and_methods_get_openai_errors() -> None:
    async with running_fake_cluster() as fakes:
        address = fakes.gateway.http_address
        for path in ("/v2", "/v1", "/v1/completions/", "/v1/pooling", "/%00"):
            reply = await call(address, path)
            assert (reply.status, reply.error["code"]) == (404, "not_found")
        for path in ("/pooling", "/v1/pooling"):
            refused = await call(address, path, {"model": "toy", "input": "x"})
            message = f"{path} is not supported; use /v1/embeddings, /v1/classify, /v1/score or /v1/rerank"
            assert (refused.status, refused.error["message"]) == (404, message)
        for path, near in NEAR.items():
            reply = await call(address, path, {})
            assert (reply.status, f"did you mean {near}?" in reply.json["error"]["message"]) == (404, True), reply.body
            assert reply.json["error"]["type"] == ("not_found_error" if "message" in path else "invalid_request_error")
        for path in ("/v1/responses/compact", "/v1/responses/resp_1", "/v1/responses/resp_1/cancel"):
            reply = await call(address, path, {})
            assert (reply.status, "send the whole conversation" in reply.error["message"]) == (404, True)
        assert "did you mean" not in (await call(address, "/v3/stories", {})).error["message"]
        assert (await call(address, "/v1/models/")).json == (await call(address, "/v1/models")).json
        for path, method in (("/v1/completions", "GET"), ("/v1/chat/completions", "PUT"), ("/health", "DELETE")):
            reply = await call(address, path, method=method)
            assert (reply.status, reply.error["code"]) == (405, "method_not_allowed")
            assert reply.headers["x-request-id"]


async def test_the_chat_template_flag_is_used(tmp_path: pathlib.Path) -> None:
    mine = tmp_path / "mine.jinja"
    mine.write_text("{% for message in messages %}({{ message.role }}: {{ message.content }}){% endfor %}")
    async with running_fake_cluster(chat_template=str(mine)) as fakes:
        address = fakes.gateway.http_address
        assert (await call(address, "/v1/chat/completions", CHAT)).status == 200
        sent = list(fakes.decode.submits[-1].token_ids)
        written = (await call(address, "/detokenize", {"tokens": sent})).json["prompt"]
    assert written.endswith(f"(user: {CHAT['messages'][-1]['content']})")


async def test_a_request_id_is_accepted_or_generated_and_echoed() -> None:
    async with running_fake_cluster() as fakes:
        address = fakes.gateway.http_address
        named = await call(address, "/v1/completions", TEXT, {"X-Request-Id": "bench/1:a.b-c_d"})
        assert named.headers["x-request-id"] == "bench/1:a.b-c_d"
        assert fakes.decode.submits[-1].request_id == "bench/1:a.b-c_d"
        # The id is a label: its reuse is a new request, with a new answer id.
        again = await call(address, "/v1/completions", TEXT, {"X-Request-Id": "bench/1:a.b-c_d"})
        assert (again.status, again.headers["x-request-id"]) == (200, "bench/1:a.b-c_d")
        assert again.json["id"] != named.json["id"]
        made = [(await call(address, "/v1/completions", TEXT)).headers["x-request-id"] for _ in range(2)]
        assert len(set(made)) == 2
        for bad in ("x" * 129, "a b", "ä", "a;b", "", '"1"', "{}"):
            for path in ("/v1/completions", "/v1/nothing"):
                replaced = await call(address, path, TEXT, {"X-Request-Id": bad})
                assert replaced.status == (200 if path == "/v1/completions" else 404)
                assert re.fullmatch("req-[0-9a-f]{24}", replaced.headers["x-request-id"])
            assert fakes.decode.submits[-1].request_id != bad
        wrong = await call(address, "/v1/completions", {"model": "toy"}, {"X-Request-Id": "w"})
        assert (wrong.status, wrong.headers["x-request-id"]) == (400, "w")


async def test_the_size_of_bodies_is_checked_before_reading() -> None:
    async with running_fake_cluster() as fakes:
        address = fakes.gateway.http_address
        # Announced by Content-Length: refused before the body is sent.
        async with connected(address) as (reader, writer):
            head = request_bytes("POST", "/v1/completions", b"", {"Content-Length": str(MAX_SENT_BYTES + 1)})
            writer.write(head)
            assert (await reader.readline()).split()[1] == b"413"
        async with connected(address) as (reader, writer):
            head = request_bytes("POST", "/v1/completions", b"").replace(
                b"Content-Length: 0", b"Transfer-Encoding: chunked"
            )
            writer.write(head)
            chunk = b"%x\r\n" % 2**20 + b" " * 2**20 + b"\r\n"
            for _ in range(MAX_BODY_BYTES // 2**20 + 1):
                writer.write(chunk)
            assert (await reader.readline()).split()[1] == b"413"
        large = {"model": "toy", "prompt": "x" * (MAX_BODY_BYTES - 100)}
        assert (await call(address, "/v1/completions", large)).status == 400
        long_header = await call(address, "/v1/completions", TEXT, {"X-Filler": "x" * 100_000})
        assert (long_header.status, long_header.headers["connection"]) == (431, "close")
        async with connected(address) as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\nX-Filler: " + b"x" * 40_000)
            assert (await reader.readline()).split()[1] == b"400"
        assert (await call(address, "/v1/completions", TEXT)).status == 200


async def test_only_json_bodies_are_accepted() -> None:
    async with running_fake_cluster() as fakes:
        address = fakes.gateway.http_address
        for headers in ({"Content-Type": "text/plain"}, {"Content-Type": ""}, {"Content-Encoding": "gzip, br"}):
            assert (await call(address, "/v1/completions", TEXT, headers)).status == 415
        charset = {"Content-Type": "application/JSON; charset=utf-8"}
        assert (await call(address, "/v1/completions", TEXT, charset)).status == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"\xff\xfe",
        b'\xef\xbb\xbf\xef\xbb\xbf{"prompt": "x"}',
        b'{"prompt": "x"} {}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "seed": 1' + b"0" * 6000 + b"}",
        b'{"prompt": "x", "logit_bias": {"1' + b"0" * 5000 + b'": 1}}',
        b'{"prompt": [1' + b"0" * 30 + b"]}",
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "x", "metadata": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
        b'{"prompt": "x", "stream": "true"}',
        b'{"prompt": "x", "n": true}',
        b'{"prompt": "x", "n": 1.5}',
    ],
    ids=lambda body: body[:40].decode("latin-1"),
)
async def test_an_invalid_request_is_400(body: bytes, fakes) -> None:
    reply = await call(fakes.gateway.http_address, "/v1/completions", body)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    assert (await call(fakes.gateway.http_address, "/v1/completions", TEXT)).status == 200


async def test_a_trailing_slash_and_a_byte_order_mark_are_accepted(fakes) -> None:
    for path in ("/v1/completions", "/v1/completions/", "/v1/completions//"):
        for mark in (b"", b"\xef\xbb\xbf"):
            reply = await call(fakes.gateway.http_address, path, mark + json.dumps(TEXT).encode())
            assert reply.status == 200, (path, mark)
    assert (await call(fakes.gateway.http_address, "/", {})).status == 405


@pytest.fixture
async def fakes():
    async with running_fake_cluster() as running:
        yield running


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequest("x"), 400, "invalid_value"),
        (errors.Unauthenticated("x"), 401, "invalid_api_key"),
        (errors.PermissionDenied("x"), 403, "permission_denied"),
        (errors.NotFound("x"), 404, "not_found"),
        (errors.Conflict("x"), 409, "conflict"),
        (errors.Overloaded("x"), 429, "rate_limit_exceeded"),
        (errors.Cancelled("x"), 499, "cancelled"),
        (errors.Internal("x"), 500, "internal_error"),
        (errors.Unavailable("x"), 503, "unavailable"),
        (errors.DeadlineExceeded("x"), 504, "deadline_exceeded"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_error_has_its_status(error: errors.PillionError, status: int, code: str) -> None:
    answer = from_pillion(error, {})
    assert (answer.status, answer.code) == (status, code)
    expected = {429: {b"retry-after", b"retry-after-ms"}, 503: {b"retry-after", b"retry-after-ms"}}
    assert {name for name, _ in answer.headers()} == (expected | {401: {b"www-authenticate"}}).get(status, set())


def test_every_error_class_is_tested() -> None:
    assert {from_pillion(kind("x"), {}).status for kind in errors.BY_CODE.values()} >= {
        400,
        401,
        403,
        404,
        409,
        429,
        503,
    }


def test_retry_delays_are_in_seconds_and_milliseconds() -> None:
    headers = dict(from_pillion(errors.Overloaded("x", 1500), {}).headers())
    assert headers == {b"retry-after": b"2", b"retry-after-ms": b"1500"}


async def test_a_request_that_killed_workers_is_not_retried_by_clients() -> None:
    """OpenAI's client retries every 500 unless that header is set."""
    async with running_fake_cluster() as fakes:
        fakes.decode.is_killed_by = lambda submit: True
        async with openai.AsyncOpenAI(base_url=f"http://{fakes.gateway.http_address}/v1", api_key="none") as client:
            with pytest.raises(openai.InternalServerError, match="two workers were lost in a step"):
                await client.completions.create(model="toy", prompt="x")
        assert len(fakes.decode.submits) == 2
        await fakes.settled()


def test_fields_are_named_as_the_client_spelled_them() -> None:
    error = InvalidRequest.of(FieldViolation("sampling.stop[2]", "empty"), FieldViolation("text", "long"))
    answer = from_pillion(error, {"text": "prompt"})
    assert (answer.param, answer.message) == ("stop[2]", "stop[2]: empty; prompt: long")


async def test_overload_and_missing_parts_have_a_retry_delay() -> None:
    async with running_fake_cluster(max_inflight_requests=1) as fakes:
        address = fakes.gateway.http_address
        fakes.decode.gate.clear()
        first = asyncio.create_task(call(address, "/v1/completions", TEXT))
        await until("a submit", lambda: fakes.decode.submits)
        full = await call(address, "/v1/chat/completions", CHAT)
        assert (full.status, full.error["code"]) == (429, "rate_limit_exceeded")
        assert (full.headers["retry-after"], full.headers["retry-after-ms"]) == ("1", "1000")
        fakes.decode.gate.set()
        assert (await first).status == 200
        await fakes.settled()
    async with running_fake_cluster(roles="kvnode") as fakes:
        address = fakes.gateway.http_address
        assert (await call(address, "/health")).status == 503
        assert (await call(address, "/v1/models")).json["data"] == []
        gone = await call(address, "/v1/completions", TEXT)
        assert (gone.status, gone.error["type"], gone.headers["retry-after"]) == (503, "server_error", "1")
        await fakes.settled()


async def test_tokenize_and_detokenize_round_trip() -> None:
    async with running_fake_cluster() as fakes:
        address = fakes.gateway.http_address
        text = "Größe 北京"
        tokenized = (await call(address, "/tokenize", {"model": "toy", "prompt": text, "return_token_strs": True})).json
        assert tokenized["count"] == len(tokenized["tokens"]) == len(text.encode())
        assert (tokenized["max_model_len"], tokenized["token_strs"][0]) == (MAX_LEN, "G")
        assert tokenized["token_strs"][2] == "bytes:\\xc3"
        back = await call(address, "/detokenize", {"model": "toy", "tokens": tokenized["tokens"]})
        assert back.json == {"prompt": text}
        bare = (await call(address, "/tokenize", {"model": "toy", "prompt": text, "add_special_tokens": False})).json
        assert bare["tokens"] == tokenized["tokens"], "this tokenizer adds none"
        chat = (await call(address, "/tokenize", {"messages": CHAT["messages"]})).json
        await call(address, "/v1/chat/completions", CHAT)
        assert chat["tokens"] == fakes.decode.submits[-1].token_ids
        assert chat["token_strs"] is None
        assert (await call(address, "/detokenize", {"tokens": []})).json == {"prompt": ""}
        wrong = {
            "/tokenize": [{}, {"prompt": "x", **CHAT}, {"prompt": "x", "add_special_tokens": 1}, {"prompt": 5}],
            "/detokenize": [{}, {"tokens": [259]}, {"tokens": [-1]}, {"tokens": ["a"]}, {"tokens": "a"}],
        }
        for path, bodies in wrong.items():
            for body in bodies:
                assert (await call(address, path, body)).status == 400, body


async def test_pipelined_requests_on_one_connection_are_answered() -> None:
    async with running_fake_cluster() as fakes:
        body = json.dumps(TEXT).encode()
        one = request_bytes("POST", "/v1/completions", body, {"Connection": "keep-alive"})
        last = request_bytes("POST", "/v1/completions", body)
        async with connected(fakes.gateway.http_address) as (reader, writer):
            writer.write(one + one + last)
            answers = await reader.read()
        assert answers.count(b"HTTP/1.1 200 OK") == 3
        assert answers.count(f"fp_{FINGERPRINT[:10]}".encode()) == 3
        await fakes.settled()


async def test_garbage_on_the_wire_gets_a_400(fakes) -> None:
    address = fakes.gateway.http_address
    for raw in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n"):
        assert (await send(address, raw)).status == 400
    assert (await call(address, "/health")).status == 200
