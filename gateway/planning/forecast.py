"""Defines the seam at which a room forecasts how many workers are wanted, and what a gateway tells it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from pillion.config import GatewayFlags
from pillion.observability.metrics import Reading
from pillion.rooms import Seam, entered_one
from pillion.wire.registry import ComponentRecord


class PlannedPrompt(NamedTuple):
    """Describes a planned request in numbers of tokens: cached ones, those up to the split, and all of its prompt's."""

    cached: int
    split: int
    prompt: int


class GivenAnswer(NamedTuple):
    """Describes what a request generated: all tokens of its ``answers``, after a prompt of ``prompt`` tokens."""

    prompt: int
    tokens: int
    answers: int


class Forecaster:
    """Takes what a gateway tells of its requests, to forecast how many workers are wanted. This class forecasts
    nothing."""

    def arrived(self, model: str) -> None:
        """Notes that a request came, whether it is served or refused for want of room."""

    def planned(self, model: str, prompt: PlannedPrompt) -> None:
        """Notes that a request was planned for the first time."""

    def answered(self, model: str, answer: GivenAnswer) -> None:
        """Notes that a request has ended."""

    def arrivals(self) -> tuple[tuple[str, int], ...]:
        """Returns, for this gateway's heartbeat, how many requests came to it, by model."""
        return ()

    def tick(self, now: float, components: Iterable[ComponentRecord], gateway_id: str) -> None:
        """Looks at the registry's records for the forecast; ``now`` is monotonic, in seconds. It is called often."""

    def readings(self) -> Iterator[Reading]:
        """Yields the metrics of the forecast."""
        return iter(())


FORECASTER = Seam[Callable[[GatewayFlags], Forecaster]]("gateway.planning.forecaster")


def forecaster_of(flags: GatewayFlags) -> Forecaster:
    """Makes the forecaster that a gateway's flags ask for. Raises ConfigError for objectives that make no sense."""
    return entered_one(FORECASTER)(flags)
