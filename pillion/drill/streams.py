"""A small load of streams on a cluster, and their pauses after the loss of a component."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pillion.client.client import Client
from pillion.errors import PillionError

STREAMS = 8
# Max time from a strike to the begin of the pause that it causes: tokens may be in flight, and a KV node's workers end
# after their node.
BEGINS_WITHIN_S = 1.0
AFTER_LOSS_S = 0.5
CLOSE_WITHIN_S = 5.0


@dataclass(slots=True)
class StreamTimes:
    """One stream: monotonic times of the request and of each message with tokens, numbers of replays and of recomputed
    tokens, and the error that ended it, or ""."""

    asked_s: float
    token_s: list[float] = field(default_factory=list)
    replays: int = 0
    recomputed_tokens: int = 0
    error: str = ""
    over: bool = False


class StreamLoad:
    """``count`` threads, each of which requests one answer after the other. ``streams`` has all streams, ended ones
    too; ``reach`` are arguments of :class:`pillion.Client`."""

    def __init__(
        self,
        target: str | Sequence[str],
        prompt_tokens: int,
        answer_tokens: int,
        count: int = STREAMS,
        model: str = "",
        **reach: Any,
    ) -> None:
        self.streams: list[StreamTimes] = []
        self.count = count
        self._reach = {"target": target, **reach}
        self._model = model
        self._sizes = prompt_tokens, answer_tokens
        self._over = threading.Event()
        self._seeds = itertools.count()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End all streams."""
        self._over.set()
        for thread in self._threads:
            thread.join(CLOSE_WITHIN_S)

    def _ask(self) -> None:
        prompt_tokens, answer_tokens = self._sizes
        with Client(**self._reach) as client:
            while not self._over.is_set():
                rng, times = random.Random(next(self._seeds)), StreamTimes(time.monotonic())  # noqa: S311
                ids = [rng.randrange(100, 250) for _ in range(prompt_tokens)]
                length = rng.randint(answer_tokens // 2, answer_tokens * 3 // 2)
                self.streams.append(times)
                asked: dict[str, Any] = {"temperature": 0.0, "max_tokens": length, "ignore_eos": True}
                try:
                    for delta in client.generate(ids, model=self._model, **asked):
                        if delta.token_ids:
                            times.token_s.append(time.monotonic())
                        if delta.timings is not None:
                            times.replays = delta.timings.replays
                        if delta.usage is not None:
                            usage = delta.usage
                            uncached = usage.prompt_tokens - usage.cached_tokens
                            times.recomputed_tokens = max(0, usage.computed_tokens - uncached)
                        if self._over.is_set():
                            break
                except PillionError as error:
                    times.error = f"{type(error).__name__}: {error.message}"
                    self._over.wait(AFTER_LOSS_S)
                times.over = True


def pauses_of(
    streams: Sequence[StreamTimes], at_s: float, within_s: float = BEGINS_WITHIN_S
) -> tuple[list[float], list[float]]:
    """Return the longest time without a token of each stream that was open at a fault, in seconds: of streams that had
    a token before, and of those that had none. Only pauses that begin within ``within_s`` after the fault count."""
    pauses: list[float] = []
    first_tokens: list[float] = []
    for stream in streams:
        later = [moment for moment in stream.token_s if moment > at_s]
        if stream.asked_s < at_s and later:
            gaps = itertools.pairwise((at_s, *later))
            longest_s, began_s = max((end - begin, begin) for begin, end in gaps if begin <= at_s + within_s)
            (pauses if stream.token_s[0] <= began_s else first_tokens).append(longest_s)
    return pauses, first_tokens
