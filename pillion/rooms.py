"""Defines seams, places of the core at which features come in, and the table of what comes in at each.

core                ``ROUTES = Seam[MakeRoutes]("gateway.http_api.routes")``, with the protocol that it carries
the table (PLACES)  for each seam the functions and classes of features, in their order
an assembly         ``for make in entered(ROUTES)``
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class Seam(Generic[T]):
    """Names a place in the core at which features add functions or classes, each of type T."""

    def __init__(self, name: str) -> None:
        self.name = name


# Slots of partial blocks are given up before those of drafts. After a step, a sequence goes back to where a state
# stands before a head gets the inputs of layers of its rows, which are computed again from there. Forced tokens are
# proposed before guesses, and a backend keeps the states for a head before it has adapters.
PLACES: Mapping[str, tuple[str, ...]] = {
}


def entered(seam: Seam[T]) -> list[T]:
    """Returns the functions and classes that features add at a seam, in the order of the table, and imports their
    modules."""
    return [cast("T", _load(place)) for place in PLACES[seam.name]]


def entered_one(seam: Seam[T]) -> T:
    """Returns the function or class at a seam where one feature comes in."""
    (found,) = entered(seam)
    return found


@cache
def _load(place: str) -> object:
    """Returns the attribute at ``module:attribute``. Raises what importing the module raises."""
    module, _, attribute = place.partition(":")
    return cast("object", getattr(importlib.import_module(module), attribute))
