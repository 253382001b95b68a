"""A gateway and a KV node without any room: what they serve, what they refuse, and that flags of rooms are refused."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import grpc
import pytest

from pillion import rooms
from pillion.cli.checks import check_flags
from pillion.config import DecodeFlags, GatewayFlags, KVNodeFlags, ServeFlags
from pillion.decode_service.decode_server import start_decode
from pillion.errors import ConfigError, InvalidRequest
from pillion.gateway import gateway_server
from pillion.gateway.answer_formats import NO_FORMATS, parser_names
from pillion.gateway.planning.forecast import forecaster_of
from pillion.kvstore.node.kv_node import start_kvnode
from pillion.kvstore.node.pool_pins import NO_PINS, pins_of
from pillion.net.rpc import open_channel
from pillion.speculative_config import NO_SPECULATION, parse_speculative_config
from pillion.types import StructuredOutputs, Tool, ToolOptions
from pillion.v1 import gateway_pb2, gateway_pb2_grpc
from tests.support.fake_components import running_fake_cluster
from tests.support.http import call

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def no_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "ROOMS", ())


def started_with(flag: str, value: Any, tmp_path: Path) -> tuple[Any, Callable[[Any], Awaitable[object]]]:
    """The flags of a component that has this one, with it, and what starts such a component."""
    if flag in {each.name for each in fields(GatewayFlags)}:
        return GatewayFlags(model="m", redis_url="redis://x", **{flag: value}), gateway_server.start_gateway
    if flag in {each.name for each in fields(KVNodeFlags)}:
        return KVNodeFlags(node_id="n", attach_socket=str(tmp_path / "a"), **{flag: value}), start_kvnode
    if flag in {each.name for each in fields(DecodeFlags)}:
        return DecodeFlags(model="m", **{flag: value}), start_decode
    return ServeFlags(model="m", **{flag: value}), checked


async def checked(flags: ServeFlags) -> None:
    """Refuses flags of all components as `pillion serve` does, before it starts any."""
    check_flags(flags)


def other_value(each: Field[Any]) -> Any:
    """A value that the flag does not have by default."""
    if each.default is NO_SPECULATION:
        return parse_speculative_config('{"method": "ngram", "num_speculative_tokens": 2}')
    return f"{each.default}x" if isinstance(each.default, str) else not each.default or each.default + 1


FLAGS_OF_ROOMS = {each.name: each for each in fields(ServeFlags) if each.metadata.get("room")}


def test_flags_of_rooms_name_rooms() -> None:
    assert {each.metadata["room"] for each in FLAGS_OF_ROOMS.values()} <= {room.name for room in rooms.ROOMS}


@pytest.mark.parametrize("flag", FLAGS_OF_ROOMS)
async def test_a_flag_of_a_room_that_is_gone_is_refused(no_rooms: None, flag: str, tmp_path: Path) -> None:
    flags, start = started_with(flag, other_value(FLAGS_OF_ROOMS[flag]), tmp_path)
    with pytest.raises(ConfigError, match=f"^--{flag.replace('_', '-')} needs the room '"):
        await start(flags)


def test_flags_that_nobody_has_set_are_not(no_rooms: None) -> None:
    flags = GatewayFlags(model="m", redis_url="redis://x")
    gateway_server._check(flags)
    assert parser_names("", flags) == ("none", "none")
    assert forecaster_of(flags).arrivals() == ()
    assert pins_of(KVNodeFlags(node_id="n")) is NO_PINS


def test_what_has_no_format_is_refused() -> None:
    NO_FORMATS.check(ToolOptions())
    for asked in ((ToolOptions(tools=(Tool(name="f"),)), False), (ToolOptions(), True)):
        with pytest.raises(InvalidRequest, match="without formats"):
            NO_FORMATS.check(*asked)


async def test_a_gateway_without_rooms_serves_the_core(no_rooms: None) -> None:
    async with running_fake_cluster() as fakes:
        address = fakes.gateway.http_address
        chat = await call(address, "/v1/chat/completions", {"messages": MESSAGES})
        assert chat.json["choices"][0]["message"]["content"] == "The answer."
        for path in ("/v1/messages", "/v1/responses", "/v1/batches", "/v1/cache/prefixes", "/v1/load_lora_adapter"):
            assert (await call(address, path, {})).status == 404, path
        tools = [{"type": "function", "function": {"name": "f"}}]
        for field, value in (("tools", tools), ("response_format", {"type": "json_object"})):
            refused = await call(address, "/v1/chat/completions", {"messages": MESSAGES, field: value})
            assert (refused.status, refused.json["error"]["param"]) == (400, field)
        described = (await call(address, "/openapi.json")).json
        assert set(described["components"]["schemas"]) >= {"ChatBody", "Error"}
        assert "AnthropicError" not in described["components"]["schemas"]
        with pytest.raises(InvalidRequest):
            [one async for one in fakes.client.generate("x", structured_outputs=StructuredOutputs(regex="a"))]
        async with open_channel(fakes.gateway.grpc_address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await gateway_pb2_grpc.GatewayStub(channel).ListPrefixes(gateway_pb2.ListPrefixesRequest())
            assert failed.value.code() is grpc.StatusCode.NOT_FOUND
