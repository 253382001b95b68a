"""When, how often and for how long a client resumes a broken stream, and which address it calls."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lab.testbed.conditions import WITHIN_S, until
from lab.testbed.ports import free_port
from pillion import AsyncClient, Client, ConfigError, DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from pillion.client import connection, resume
from pillion.client.connection import (
    MAX_ADDRESSES,
    RETRY_ATTEMPTS,
    RETRY_FIRST_BACKOFF_S,
    RETRY_MAX_BACKOFF_S,
    connect,
)
from pillion.client.resume import (
    CONNECT_TIMEOUT_S,
    MAX_RESUME_ATTEMPTS,
    MAX_RESUME_DELAY_MS,
    RESUME_TIMEOUT_S,
    StreamProgress,
)
from pillion.errors import PillionError
from pillion.types import AnswerSoFar, FinishReason, GenerateRequest, Resume, SamplingParams, StreamOrigin
from pillion.v1 import gateway_pb2
from pillion.wire.common import finish_to_pb
from tests.pillion.client.test_connection import Scripted, serving, texts
from tests.support.fake_components import running_fake_cluster

# An error of the connection, and whether there was one.
LOST, NOWHERE = (Unavailable("Socket closed"), False, True), (Unavailable("recvmsg: reset by peer"), False, False)
ORIGIN = StreamOrigin(-5, bytes(32), 8)


def message(*token_ids: int, index: int = 0, first: bool = False, reason: FinishReason | None = None):
    origin = gateway_pb2.StreamOrigin(seed=-5, digest=bytes(32), cached_tokens=8) if first else None
    return gateway_pb2.GenerateResponse(
        request_id="r-1", token_ids=token_ids, index=index, origin=origin, finish_reason=finish_to_pb(reason)
    )


def progress(
    timeout_s: float | None = None,
    resume_timeout_s: float = RESUME_TIMEOUT_S,
    addresses: int = 1,
    n: int = 1,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
):
    request = GenerateRequest(text="x", sampling=SamplingParams(n=n))
    return StreamProgress(request, timeout_s, resume_timeout_s, connect_timeout_s, addresses, 100.0)


def test_a_resume_continues_after_the_last_received_tokens() -> None:
    stream = progress(n=3)
    assert stream.request().resume is None
    for one in (message(3, 4, first=True), message(9, index=2, reason=FinishReason.STOP), message(5)):
        stream.accept(one)
    assert stream.delay_s(*LOST, 101.0) == 0
    again = stream.request()
    answers = (AnswerSoFar((3, 4, 5)), AnswerSoFar(), AnswerSoFar((9,), FinishReason.STOP))
    assert (again.resume, again.request_id, again.text) == (Resume(ORIGIN, answers), "r-1", "x")


def test_resume_attempts_and_time_are_bounded_and_reset_by_each_token() -> None:
    stream, now_s = progress(resume_timeout_s=1e9), 100.0
    for _ in range(3):
        stream.accept(message(7, first=True))
        delays = []
        for _ in range(MAX_RESUME_ATTEMPTS):
            delays.append(stream.delay_s(*LOST, now_s))
            now_s += 1
            # Where no gateway was reached, no gateway has been asked.
            delays.append(stream.delay_s(*NOWHERE, now_s))
            now_s += 1
        assert delays[0] == 0
        assert 0 < delays[1] < max(delays) <= MAX_RESUME_DELAY_MS / 1000
    with pytest.raises(Unavailable, match=f"not resumed in {2 * MAX_RESUME_ATTEMPTS} attempts"):
        stream.delay_s(*LOST, now_s)
    late = progress()
    late.accept(message(7, first=True))
    late.delay_s(*LOST, 500.0)
    late.delay_s(Overloaded("full", 300), True, True, 500.0 + RESUME_TIMEOUT_S - 1)
    with pytest.raises(Overloaded, match="full"):
        late.delay_s(Overloaded("full", 300), True, True, 500.0 + RESUME_TIMEOUT_S)


def test_a_gateways_error_is_final_except_on_resume() -> None:
    for error in (Unavailable("no decode worker lives"), Overloaded("full", 100), InvalidRequest("bad")):
        for begun in (False, True):
            stream = progress(addresses=3)
            if begun:
                stream.accept(message(7, first=True))
            with pytest.raises(type(error)):
                stream.delay_s(error, True, True, 100.0)
        stream = progress()
        stream.accept(message(7, first=True))
        stream.delay_s(*LOST, 100.0)
        if isinstance(error, InvalidRequest):
            with pytest.raises(InvalidRequest):
                stream.delay_s(error, True, True, 100.0)
        else:
            assert stream.delay_s(error, True, True, 100.0) > 0


def test_unreachable_gateways_are_retried_in_rounds_with_backoff() -> None:
    stream = progress(addresses=3, connect_timeout_s=0)
    pauses = [stream.delay_s(*NOWHERE, 100.0) for _ in range(3 * RETRY_ATTEMPTS - 1)]
    with pytest.raises(Unavailable):
        stream.delay_s(*NOWHERE, 100.0)
    assert all(pause_s == 0 for number, pause_s in enumerate(pauses, 1) if number % 3)
    for number, pause_s in enumerate(pauses[2::3]):
        most_s = min(RETRY_FIRST_BACKOFF_S * 2**number, RETRY_MAX_BACKOFF_S)
        assert most_s / 2 <= pause_s <= most_s
    waiting = progress()
    assert waiting.delay_s(*LOST, 100.0) == 0
    assert waiting.delay_s(*NOWHERE, 101.0) > 0
    assert waiting.request().resume is None


def pauses_until_given_up(stream: StreamProgress) -> list[float]:
    """Return the pauses of a stream whose calls fail from second 100 on, without a connection."""
    pauses: list[float] = []
    with contextlib.suppress(Unavailable):
        while True:
            pauses.append(stream.delay_s(*NOWHERE, 100.0 + sum(pauses)))
    return pauses


@pytest.mark.parametrize("addresses", [1, 3])
def test_a_gateway_that_does_not_listen_yet_is_waited_for(addresses: int) -> None:
    pauses = pauses_until_given_up(progress(addresses=addresses))
    assert CONNECT_TIMEOUT_S <= sum(pauses) <= CONNECT_TIMEOUT_S + RETRY_MAX_BACKOFF_S
    assert max(pauses) <= RETRY_MAX_BACKOFF_S
    assert len(pauses) < 2 * addresses * (CONNECT_TIMEOUT_S / RETRY_MAX_BACKOFF_S + RETRY_ATTEMPTS)


def test_waiting_for_a_gateway_ends_with_the_requests_own_time() -> None:
    waited_s = sum(pauses_until_given_up(progress(timeout_s=3.0)))
    assert 3.0 - RETRY_MAX_BACKOFF_S < waited_s < 3.0


def test_the_timeout_of_a_whole_stream_is_not_extended() -> None:
    stream = progress(timeout_s=10)
    assert stream.timeout_s(100.0) == 10
    stream.accept(message(7, first=True))
    stream.delay_s(*LOST, 109.9)
    assert stream.delay_s(Overloaded("full", 2000), True, True, 109.9) <= 0.1 + 1e-6
    assert stream.timeout_s(109.5) == pytest.approx(0.5)
    with pytest.raises(DeadlineExceeded):
        stream.timeout_s(110.0)


@contextlib.contextmanager
def cutting(cut: bytes) -> Iterator[str]:
    """A listener that cuts each connection (SO_LINGER ``cut``) before it sends anything: a proxy without a server
    behind it, or a gateway that is starting."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def cut_all() -> None:
            with contextlib.suppress(OSError):
                while True:
                    one, _ = listener.accept()
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, cut)
                    one.close()

        thread = threading.Thread(target=cut_all, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.mark.parametrize("cut", [struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)], ids=["reset", "closed"])
@pytest.mark.parametrize("blocking", [False, True])
async def test_a_connection_cut_during_its_handshake_is_retried(
    cut: bytes, blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    counted = StreamProgress.delay_s

    def delay_s(stream: StreamProgress, error: PillionError, spoken: bool, connected: bool, now_s: float) -> float:
        seen.append(connected)
        if len(seen) > 2 * RETRY_ATTEMPTS:
            raise error
        return counted(stream, error, spoken, connected, now_s) / 100

    monkeypatch.setattr(StreamProgress, "delay_s", delay_s)

    def ask(address: str) -> None:
        with Client(address, connect_timeout_s=WITHIN_S) as client:
            list(client.generate("x"))

    with cutting(cut) as address:
        async with AsyncClient(address, connect_timeout_s=WITHIN_S) as client:
            with pytest.raises(Unavailable):
                await (asyncio.to_thread(ask, address) if blocking else texts(client))
    assert seen == [False] * (2 * RETRY_ATTEMPTS + 1)


@pytest.mark.parametrize("scheme", ["", "unix:"])
async def test_a_request_waits_until_a_gateway_listens(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[float] = []
    counted = StreamProgress.delay_s

    def delay_s(stream: StreamProgress, *args: Any) -> float:
        refused.append(counted(stream, *args) / 100)
        return refused[-1]

    monkeypatch.setattr(StreamProgress, "delay_s", delay_s)
    with tempfile.TemporaryDirectory(prefix="pil-") as folder:
        address = f"unix:{folder}/gateway.sock" if scheme else f"127.0.0.1:{free_port()}"
        async with AsyncClient(address, connect_timeout_s=WITHIN_S) as client:
            asked = asyncio.create_task(texts(client))
            await until("more refusals than a lost gateway has attempts", lambda: len(refused) > RETRY_ATTEMPTS)
            async with serving(Scripted(), address):
                assert await asked == ["x"]


async def test_the_next_address_is_tried_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (connection, resume):
        monkeypatch.setattr(module, "RETRY_FIRST_BACKOFF_S", 0.01)
    async with running_fake_cluster("Hello") as fakes:
        dead, alive = f"127.0.0.1:{free_port()}", fakes.gateway.grpc_address
        async with AsyncClient([dead, alive]) as client:
            assert "".join([delta.text async for delta in client.generate("x")]) == "Hello"
            assert [model.name for model in await client.models()] == ["toy", "models/toy"]

        def ask() -> str:
            with Client(f"{dead}, {alive}") as client:
                assert client.status().version
                return "".join(delta.text for delta in client.generate("x"))

        assert await asyncio.to_thread(ask) == "Hello"
    async with AsyncClient([dead, dead]) as client:
        with pytest.raises(Unavailable, match="does a gateway listen at"):
            await client.models()


def test_addresses_are_checked() -> None:
    assert connect("a:1,grpcs://b:2").targets == ("a:1", "b:2")
    assert connect(["a:1", "unix:/x"]).targets == ("a:1", "unix:/x")
    for bad in ("", "a:1,", [], ["a:1"] * (MAX_ADDRESSES + 1), "grpc://a:1,grpcs://b:2"):
        with pytest.raises(ConfigError):
            connect(bad)
