"""Connections of the HTTP port: how answers are cut into segments, and what clients of other protocols ask."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from tests.support.fake_components import running_fake_cluster
from tests.support.http import data_segments, request_bytes

TEXT = {"model": "toy", "prompt": "hi"}


@pytest.mark.parametrize("path", ["/version", "/v1/completions", "/nowhere"])
async def test_an_answer_is_one_segment_that_waits_for_no_acknowledgement(path: str) -> None:
    """Twenty answers on one connection. The second segment of an answer would wait for an acknowledgement of the first
    one, which a client's system sends 40 ms later."""
    body = json.dumps(TEXT).encode() if path == "/v1/completions" else None
    asked = request_bytes("GET" if body is None else "POST", path, body, {"Connection": "keep-alive"})
    async with running_fake_cluster("abc") as fakes:
        host, _, port = fakes.gateway.http_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        client = writer.get_extra_info("socket")
        for answers in range(1, 21):
            writer.write(asked)
            head = await reader.readuntil(b"\r\n\r\n")
            (length,) = (int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(length)
            assert data_segments(client) == answers
        (connection,) = fakes.gateway.http.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        await fakes.settled()
