"""Shares what each gateway has under way on each component, in Redis, where the others read it before they plan.

    tell --lua/tell_load.lua--> a gateway's hash: component --> amount, tokens; gone LOAD_TTL_MS after the last change
    read --lua/read_loads.lua--> the sums over some gateways' hashes

If Redis is lost, gateways know each other's work by the workers' heartbeats alone.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from pillion.kvstore.index import redis_keys as keys
from pillion.kvstore.index.redis_link import Argument, RedisScripts, ScriptCall, as_bytes

# A request waits for a read, which takes a fraction of a millisecond where Redis is well.
READ_LOADS_DEADLINE_MS = 100
TELL_LOAD_DEADLINE_MS = 500
# The load of a gateway that died is forgotten after this time.
LOAD_TTL_MS = 6000
# One call tells at most this many changes, and asks about at most this many gateways.
MAX_CHANGES_PER_CALL = 512
MAX_OTHER_GATEWAYS = 64


class UnderWay(NamedTuple):
    """Holds what gateways have under way on a component: ``amount`` in the unit of its role, streams for decode and
    tokens for prefill workers, and prompt ``tokens`` that are yet to be computed."""

    amount: int = 0
    tokens: int = 0


NOTHING_UNDER_WAY = UnderWay()
# Redis keeps both numbers in this form.
_PACKED = struct.Struct(">II")
_MOST = 2**32 - 1


class SharedLoads(RedisScripts):
    """Shares the loads that gateways have put on components. Raises ConfigError for a bad URL."""

    scripts = ("tell_load", "read_loads")

    async def tell(self, gateway_id: str, loads: Mapping[str, UnderWay], *, whole: bool) -> None:
        """Writes loads of ``gateway_id``, MAX_CHANGES_PER_CALL at most; ``whole`` says that it has nothing else. Raises
        Unavailable when Redis does not answer in time, or refuses; it may have taken them all the same."""
        args: list[Argument] = [LOAD_TTL_MS, int(whole)]
        for component_id, load in loads.items():
            packed = _PACKED.pack(min(load.amount, _MOST), min(load.tokens, _MOST))
            args += [component_id, packed if load != NOTHING_UNDER_WAY else b""]
        call = ScriptCall([keys.load_of(gateway_id)], args)
        await self._link.call("tell_load", call, int, deadline_ms=TELL_LOAD_DEADLINE_MS)

    async def read(self, gateway_ids: Sequence[str], component_ids: Sequence[str]) -> list[UnderWay]:
        """Returns for each component the sum of what these gateways have under way there; of more than
        MAX_OTHER_GATEWAYS it asks only the first ones. Raises Unavailable when Redis does not answer in time, or
        refuses."""
        asked = [keys.load_of(name) for name in gateway_ids[:MAX_OTHER_GATEWAYS]]
        call = ScriptCall(asked, ["\n".join(component_ids)])
        read = partial(_read, len(component_ids))
        return await self._link.call("read_loads", call, read, deadline_ms=READ_LOADS_DEADLINE_MS)


def _read(components: int, raw: Any) -> list[UnderWay]:
    sums = as_bytes(raw)
    if len(sums) != components * _PACKED.size:
        raise ValueError(f"{len(sums)} bytes are not the loads of {components} components")
    return list(map(UnderWay._make, _PACKED.iter_unpack(sums)))
