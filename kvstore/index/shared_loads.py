"""Work that each gateway has under way on each component, in Redis, for the planning of the others.

    tell --lua/tell_load.lua--> a gateway's hash: component --> amount, tokens; expires LOAD_TTL_MS after the last
    change read --lua/read_loads.lua--> the sums over some gateways' hashes

Without Redis, gateways see each other's work through the workers' heartbeats only.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from pillion.kvstore.index import redis_keys as keys
from pillion.kvstore.index.redis_link import Argument, RedisScripts, ScriptCall, as_bytes

# A request waits for a read, a fraction of a millisecond normally.
READ_LOADS_DEADLINE_MS = 100
TELL_LOAD_DEADLINE_MS = 500
LOAD_TTL_MS = 6000
MAX_CHANGES_PER_CALL = 512
MAX_OTHER_GATEWAYS = 64


class UnderWay(NamedTuple):
    """Work of gateways on a component: ``amount`` in the unit of its role (streams for decode workers, tokens for
    prefill workers), and prompt ``tokens`` yet to be computed."""

    amount: int = 0
    tokens: int = 0


NOTHING_UNDER_WAY = UnderWay()
_PACKED = struct.Struct(">II")
_MOST = 2**32 - 1


class SharedLoads(RedisScripts):
    """Loads that gateways have put on components. Raises ConfigError for a bad URL."""

    scripts = ("tell_load", "read_loads")

    async def tell(self, gateway_id: str, loads: Mapping[str, UnderWay], *, whole: bool) -> None:
        """Write up to MAX_CHANGES_PER_CALL loads of ``gateway_id``; ``whole`` if it has no others. Raises Unavailable
        if Redis does not answer in time, or refuses; they may have been written nevertheless."""
        args: list[Argument] = [LOAD_TTL_MS, int(whole)]
        for component_id, load in loads.items():
            packed = _PACKED.pack(min(load.amount, _MOST), min(load.tokens, _MOST))
            args += [component_id, packed if load != NOTHING_UNDER_WAY else b""]
        call = ScriptCall([keys.load_key(gateway_id)], args)
        await self._link.call("tell_load", call, int, deadline_ms=TELL_LOAD_DEADLINE_MS)

    async def read(self, gateway_ids: Sequence[str], component_ids: Sequence[str]) -> list[UnderWay]:
        """Return for each component the sum of these gateways' loads, of the first MAX_OTHER_GATEWAYS only. Raises
        Unavailable if Redis does not answer in time, or refuses."""
        asked = [keys.load_key(name) for name in gateway_ids[:MAX_OTHER_GATEWAYS]]
        call = ScriptCall(asked, ["\n".join(component_ids)])
        read = partial(_read, len(component_ids))
        return await self._link.call("read_loads", call, read, deadline_ms=READ_LOADS_DEADLINE_MS)


def _read(components: int, raw: Any) -> list[UnderWay]:
    sums = as_bytes(raw)
    if len(sums) != components * _PACKED.size:
        raise ValueError(f"{len(sums)} bytes are not the loads of {components} components")
    return list(map(UnderWay._make, _PACKED.iter_unpack(sums)))
