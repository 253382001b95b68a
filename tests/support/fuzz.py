"""Invalid messages: random bytes, valid messages with damaged bytes or odd fields."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import FieldDescriptor

from pillion.v1 import common_pb2, gateway_pb2

TEXTS = ("", "x", "\x00", "ä" * 3000, "toy", "tenant:4:acme:", "😀" * 50, " " * 5000)
FLOATS = (0.0, -1.0, 1e30, -1e30, float("nan"), float("inf"), 1e-300, 0.5)
MAX_MUTATIONS = 4


def a_request(draw: random.Random, model: str = "") -> gateway_pb2.GenerateRequest:
    """Return a valid request."""
    sampling = common_pb2.SamplingParams(
        max_tokens=draw.randint(1, 8), temperature=draw.random(), seed=draw.getrandbits(40)
    )
    message = gateway_pb2.GenerateRequest(model=model, sampling=sampling, request_id=f"fuzz-{draw.getrandbits(32)}")
    match draw.randrange(3):
        case 0:
            message.text = "hello there"
        case 1:
            message.token_ids.extend(draw.randint(3, 60) for _ in range(draw.randint(1, 40)))
        case _:
            message.messages.add(role="user", content="hello")
    return message


def an_embed(draw: random.Random, model: str = "") -> gateway_pb2.EmbedRequest:
    """Return a valid request for a few texts."""
    message = gateway_pb2.EmbedRequest(model=model, request_id=f"fuzz-{draw.getrandbits(32)}")
    for _ in range(draw.randint(1, 3)):
        if draw.random() < 0.5:
            message.inputs.add(text="hello there")
        else:
            message.inputs.add(token_ids=[draw.randint(3, 60) for _ in range(draw.randint(1, 40))])
    return message


def a_score(draw: random.Random, model: str = "") -> gateway_pb2.ScoreRequest:
    """Return a valid request for a few pairs."""
    documents = ["hello", "there", "x" * draw.randint(1, 60)][: draw.randint(1, 3)]
    return gateway_pb2.ScoreRequest(model=model, queries=["who"], documents=documents)


def no_fields(message: Callable[[], Any]) -> Callable[[random.Random, str], Any]:
    """Return a function that makes an empty request."""
    return lambda draw, model: message()


# By method: a factory of valid requests, and its weight among all.
METHODS: dict[str, tuple[Callable[[random.Random, str], Any], int]] = {
    "Generate": (a_request, 4),
    "Embed": (an_embed, 1),
    "Score": (a_score, 1),
    "ListModels": (no_fields(gateway_pb2.ListModelsRequest), 1),
    "GetStatus": (no_fields(gateway_pb2.GetStatusRequest), 1),
}


def mutated(draw: random.Random, message: Any) -> Any:
    """Set some fields, at any depth, to unexpected values."""
    for _ in range(draw.randint(1, MAX_MUTATIONS)):
        _strange_field(draw, message)
    return message


def broken(draw: random.Random, raw: bytes) -> bytes:
    """Change, remove or repeat some bytes."""
    data = bytearray(raw)
    for _ in range(draw.randint(1, MAX_MUTATIONS)):
        if not data:
            return draw.randbytes(3)
        at = draw.randrange(len(data))
        match draw.randrange(4):
            case 0:
                data[at] = draw.randrange(256)
            case 1:
                del data[at : at + draw.randint(1, 8)]
            case 2:
                data[at:at] = draw.randbytes(draw.randint(1, 6))
            case _:
                data[at:at] = data[at : at + 20]
    return bytes(data)


def malformed(draw: random.Random, model: str = "") -> tuple[str, bytes]:
    """Return a method's name and the bytes to send."""
    (name,) = draw.choices(list(METHODS), [often for _, often in METHODS.values()])
    good = METHODS[name][0](draw, model)
    match draw.randrange(4):
        case 0:
            return name, draw.randbytes(draw.randrange(300))
        case 1:
            return name, broken(draw, good.SerializeToString())
        case _:
            return name, (mutated(draw, good) if good.DESCRIPTOR.fields else good).SerializeToString()


async def send(channel: grpc.aio.Channel, name: str, raw: bytes, timeout_s: float) -> grpc.StatusCode:
    """Send raw bytes, read the whole response, return its status."""
    path = f"/pillion.v1.Gateway/{name}"
    try:
        if name == "Generate":
            async for _ in channel.unary_stream(path)(raw, timeout=timeout_s):
                pass
        else:
            await channel.unary_unary(path)(raw, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def _strange_field(draw: random.Random, message: Any) -> None:
    field = draw.choice(message.DESCRIPTOR.fields)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        for _ in range(draw.choice((1, 3, 5000))):
            getattr(message, field.name)[draw.randint(0, 2**31 - 1)] = draw.choice(FLOATS)
    elif field.message_type is not None:
        inner = getattr(message, field.name)
        _strange_field(draw, inner.add() if field.is_repeated else inner)
    elif field.is_repeated:
        count = draw.choice((1, 20, 5000))
        getattr(message, field.name).extend(_strange(draw, field) for _ in range(count))
    else:
        setattr(message, field.name, _strange(draw, field))


def _strange(draw: random.Random, field: FieldDescriptor) -> Any:
    kind = FieldDescriptor
    if field.cpp_type == kind.CPPTYPE_STRING:
        return draw.randbytes(9) if field.type == kind.TYPE_BYTES else draw.choice(TEXTS)
    if field.cpp_type in (kind.CPPTYPE_FLOAT, kind.CPPTYPE_DOUBLE):
        return draw.choice(FLOATS)
    if field.cpp_type == kind.CPPTYPE_BOOL:
        return draw.random() < 0.5
    if field.cpp_type == kind.CPPTYPE_ENUM:
        return draw.choice((0, 1, 77))
    bits = 64 if field.cpp_type in (kind.CPPTYPE_INT64, kind.CPPTYPE_UINT64) else 32
    unsigned = field.cpp_type in (kind.CPPTYPE_UINT32, kind.CPPTYPE_UINT64)
    values = (0, 1, 5, 129, 2 ** (bits - 1) - 1)
    return draw.choice((*values, 2**bits - 1) if unsigned else (*values, -1, -(2 ** (bits - 1))))
