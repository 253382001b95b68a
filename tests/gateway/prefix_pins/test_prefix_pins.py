"""Drops of pins if a KV node cannot answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pillion.errors import NotFound, Unavailable
from pillion.gateway.gateway import Gateway
from pillion.gateway.prefix_pins.prefix_pins import PrefixPins


def pins_of(*answers: bool | Unavailable) -> PrefixPins:
    """Return pins over KV nodes that answer a drop this way."""

    def link(answer: bool | Unavailable) -> Any:
        async def unpin_prefix(epoch: int, owner: str, name: str) -> bool:
            if isinstance(answer, Unavailable):
                raise answer
            return answer

        return SimpleNamespace(alive=True, epoch=1, client=SimpleNamespace(unpin_prefix=unpin_prefix))

    links = [link(answer) for answer in answers]
    cluster = SimpleNamespace(nodes=lambda: links)
    return PrefixPins(cast("Gateway", SimpleNamespace(caches_prefixes=True, needs_keys=False, cluster=cluster)))


async def test_an_unanswered_drop_is_not_reported_as_a_missing_pin() -> None:
    silent = Unavailable("not read yet")
    await pins_of(False, silent, True).drop("x", None)
    with pytest.raises(NotFound):
        await pins_of(False, False).drop("x", None)
    for answers in ((False, silent), (silent,)):
        with pytest.raises(Unavailable, match="not read yet"):
            await pins_of(*answers).drop("x", None)
