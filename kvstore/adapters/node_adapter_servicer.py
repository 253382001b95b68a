"""The KV node's gRPC calls that move adapter files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from pillion.kvstore.adapters.node_adapters import NodeAdapters
from pillion.v1 import kvnode_pb2 as pb


def adapter_calls(adapters: NodeAdapters) -> Mapping[str, Callable[[Any, Any], Any]]:
    """Return the handlers of the adapter calls by method name."""

    async def read(request: pb.ReadAdapterRequest, context: Any) -> AsyncIterator[pb.AdapterPiece]:
        async with aclosing(adapters.pieces(request.digest, request.ask_others)) as pieces:
            async for piece in pieces:
                yield piece

    async def find(request: pb.FindAdaptersRequest, context: Any) -> pb.FindAdaptersReply:
        return pb.FindAdaptersReply(missing=await adapters.missing(request.digests))

    async def keep(requests: AsyncIterator[pb.AdapterPiece], context: Any) -> pb.KeepAdapterReply:
        await adapters.keep(aiter(requests))
        return pb.KeepAdapterReply()

    return {"ReadAdapter": read, "FindAdapters": find, "KeepAdapter": keep}
