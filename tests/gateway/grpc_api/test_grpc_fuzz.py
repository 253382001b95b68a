"""Hundreds of malformed gRPC messages (number: PILLION_FUZZ); each gets a status that blames the client."""

from __future__ import annotations

import asyncio
import logging
import os
import random

import grpc
import pytest

from lab.testbed.conditions import WITHIN_S
from pillion.net.rpc import open_channel
from tests.support.fake_components import running_fake_cluster
from tests.support.fuzz import a_request, malformed, send

COUNT = int(os.environ.get("PILLION_FUZZ", "300"))
AT_ONCE = 8
TIMEOUT_S = WITHIN_S
# Longer than any answer may be: the fake worker stops at its script's end even with ignore_eos.
SCRIPT = "abc" * 100
BLAMED = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}


async def test_malformed_messages_are_answered(caplog: pytest.LogCaptureFixture) -> None:
    draw = random.Random(6)
    codes: dict[grpc.StatusCode, int] = {}
    async with (
        running_fake_cluster(SCRIPT, max_inflight_requests=1024) as fakes,
        open_channel(fakes.gateway.grpc_address) as channel,
    ):

        async def several(count: int) -> None:
            for _ in range(count):
                name, raw = malformed(draw)
                code = await send(channel, name, raw, TIMEOUT_S)
                assert code in BLAMED, (code, name, raw)
                codes[code] = codes.get(code, 0) + 1

        with caplog.at_level(logging.ERROR):
            await asyncio.gather(*(several(COUNT // AT_ONCE) for _ in range(AT_ONCE)))
        assert not caplog.records
        assert codes[grpc.StatusCode.INVALID_ARGUMENT] > COUNT // 4
        assert codes[grpc.StatusCode.OK] > COUNT // 50
        good = a_request(draw).SerializeToString()
        assert await send(channel, "Generate", good, TIMEOUT_S) is grpc.StatusCode.OK
        await fakes.settled()


async def test_bytes_that_do_not_parse_are_a_client_error() -> None:
    async with running_fake_cluster("abc") as fakes, open_channel(fakes.gateway.grpc_address) as channel:
        for read in (
            channel.unary_stream("/pillion.v1.Gateway/Generate")(b"\xff\xff\xff").read(),
            channel.unary_unary("/pillion.v1.Gateway/ListModels")(b"\xff\xff\xff"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "cannot be read" in (caught.value.details() or "")
