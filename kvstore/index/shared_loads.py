"""Load that each gateway has put on each component, in Redis, for the plans of the other gateways.

    tell --lua/tell_load.lua--> a hash per gateway: component id --> amount, tokens; expires LOAD_TTL_MS after the last
                                change
    read --lua/read_loads.lua--> sums over some gateways' hashes

Without Redis, gateways see each other's load only by the workers' heartbeats.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from pillion.kvstore.index import redis_keys as keys
from pillion.kvstore.index.redis_link import Argument, RedisScripts, ScriptCall, as_bytes

# Short, since requests wait for it; a read normally takes a fraction of a millisecond.
READ_LOADS_DEADLINE_MS = 100
TELL_LOAD_DEADLINE_MS = 500
LOAD_TTL_MS = 6000
MAX_CHANGES_PER_CALL = 512
MAX_OTHER_GATEWAYS = 64


class UnderWay(NamedTuple):
    """Load on a component: ``amount`` in the unit of its role (streams of decode workers, tokens of prefill workers),
    and prompt ``tokens`` that are not computed yet."""

    amount: int = 0
    tokens: int = 0


_PACKED = struct.Struct(">II")


class SharedLoads(RedisScripts):
    """Client of the gateways' loads. Raises ConfigError for an invalid URL."""

    scripts = ("tell_load", "read_loads")

    async def tell(self, gateway_id: str, loads: Mapping[str, UnderWay], *, whole: bool) -> None:
        """Write up to MAX_CHANGES_PER_CALL loads of a gateway; with ``whole``, remove its loads on all other
        components. Raises Unavailable if Redis does not answer in time, or refuses; the loads may have been written
        nevertheless."""
        args: list[Argument] = [LOAD_TTL_MS, int(whole)]
        for component_id, load in loads.items():
            packed = _PACKED.pack(*(min(count, 2**32 - 1) for count in load))
            args += [component_id, packed if any(load) else b""]
        call = ScriptCall([keys.load_key(gateway_id)], args)
        await self._link.call("tell_load", call, int, deadline_ms=TELL_LOAD_DEADLINE_MS)

    async def read(self, gateway_ids: Sequence[str], component_ids: Sequence[str]) -> list[UnderWay]:
        """Return, for each component, the sum of the loads of the first MAX_OTHER_GATEWAYS of these gateways. Raises
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
