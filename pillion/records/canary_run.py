"""Follows the bundles of gateways and replays some of them on the next version: `pillion canary`."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from pillion import errors
from pillion.observability.metrics_file import GaugeSeries, gauge_page, write_whole
from pillion.records.bundle import Bundle, decode
from pillion.records.canary import CanaryOutcome, CanaryTally, TokenPace, is_in_share
from pillion.records.comparison import first_difference, logprob_distance
from pillion.records.replay import LABEL, model_of, refuse, request_of
from pillion.records.replay_client import ReplayClient, replay_client
from pillion.rules.priority import MAX_PRIORITY
from pillion.types import ModelInfo

REPLAY_TIMEOUT_S = 600.0
FOLLOW_INTERVAL_S, FOLLOWED_BUNDLES = 0.5, 1000
# Consecutive replays refused by the target, e.g. for overload, after which the canary ends.
MAX_REFUSED = 50
RETRY_S = 5.0


class CanaryExit(IntEnum):
    """Exit status of `pillion canary`."""

    PROMOTE = 0
    STOP = 1
    UNDECIDED = 2


@dataclass(slots=True, kw_only=True)
class Canary:
    """Replays bundles on one target until the rule of a tally decides.

    Attributes:
        listed: returns ids and sizes of the gateways' bundles, newest first; blocks.
        read: returns an encoded bundle by id; blocks.
        key: the deployment's key; None: bundles are not verified.
        reach: arguments of :class:`pillion.AsyncClient` for the target.
        tally: counts the outcomes.
        say: prints a line.
        model: the target's name of the model; "": the name in the bundles.
        share: share of the full bundles to replay, from 0 to 1.
        concurrency: maximum number of replays at once.
        tokens_per_s: maximum rate of tokens of prompts and answers.
        existing: replay the existing bundles, then end; else replay those that are written from now on.
        metrics_file: gets the figures for Prometheus after each replay; None: no file.
        left_out: number of bundles that were not replayed, by reason.
    """

    listed: Callable[[], Iterable[tuple[str, int]]]
    read: Callable[[str], bytes]
    key: bytes | None
    reach: dict[str, Any]
    tally: CanaryTally
    say: Callable[[str], None]
    model: str = ""
    share: float = 1.0
    concurrency: int = 1
    tokens_per_s: float = 100.0
    existing: bool = False
    metrics_file: Path | None = None
    left_out: Counter[str] = field(default_factory=Counter)
    _models: list[ModelInfo] = field(default_factory=list)
    _refused: int = 0

    async def run(self) -> CanaryExit:
        """Replay bundles until the rule decides, and return the exit status; UNDECIDED if there were too few bundles.
        Raises PillionError if the target does not answer."""
        async with replay_client(**self.reach) as client:
            self._models = await client.models()
            shared = (client, TokenPace(self.tokens_per_s), self._bundles(), asyncio.Lock())
            tasks = [asyncio.create_task(self._work(*shared)) for _ in range(self.concurrency)]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
        for why, count in sorted(self.left_out.items()):
            self.say(f"not replayed: {count} {why}")
        tally, promote, broken = self.tally, self.tally.verdict(), "; ".join(self.tally.broken())
        if promote is None:
            words = f"{tally.all.requests} of {tally.wanted} requests were replayed"
            self.say(f"undecided: {words}{broken and f'; {broken}'}")
            return CanaryExit.UNDECIDED
        self.say("promote" if promote else f"stop: {broken}")
        return CanaryExit.PROMOTE if promote else CanaryExit.STOP

    async def _bundles(self) -> AsyncIterator[Bundle]:
        """Yield the bundles to replay until the rule has decided, new ones as they are written."""
        known_ids = set() if self.existing else set(await asyncio.to_thread(self._newest))
        while self.tally.verdict() is None:
            try:
                ids = await asyncio.to_thread(self._newest)
                known_ids.intersection_update(ids)
                for bundle_id in reversed(ids):
                    if bundle_id not in known_ids and self.tally.verdict() is None:
                        bundle = await asyncio.to_thread(self._wanted, bundle_id)
                        known_ids.add(bundle_id)
                        if bundle is not None:
                            yield bundle
            except errors.Unavailable:
                if self.existing:
                    raise
            if self.existing:
                return
            await asyncio.sleep(FOLLOW_INTERVAL_S)

    def _newest(self) -> list[str]:
        """Return the newest bundle ids, newest first: all with ``existing``, else up to FOLLOWED_BUNDLES."""
        return [one for one, _ in itertools.islice(self.listed(), None if self.existing else FOLLOWED_BUNDLES)]

    def _wanted(self, bundle_id: str) -> Bundle | None:
        """Read a bundle; None if it is not to be replayed or was removed."""
        if not is_in_share(bundle_id, self.share) or not (raw := self.read(bundle_id)):
            return None
        try:
            bundle, _ = decode(raw, bundle_id, self.key)
            refuse(bundle)
            model_of(bundle, self._models, self.model, any_model=True)
        except errors.ConfigError as error:
            if not self.left_out["that cannot be replayed"]:
                self.say(f"{error.message}; further ones are only counted")
            self.left_out["that cannot be replayed"] += 1
            return None
        if bundle.request.label.startswith(LABEL):
            self.left_out["that are replays"] += 1
            return None
        return bundle

    async def _work(
        self, client: ReplayClient, pace: TokenPace, bundles: AsyncIterator[Bundle], turn: asyncio.Lock
    ) -> None:
        """Replay bundles one after the other while there are any. Raises PillionError."""
        while True:
            async with turn:
                bundle = await anext(bundles, None)
                if bundle is None:
                    return
                tokens = bundle.request.prompt_tokens + sum(answer.tokens for answer in bundle.answers)
                await asyncio.sleep(pace.spend(tokens, time.monotonic()))
            outcome = await self._replayed(client, bundle)
            if outcome is None:
                self.left_out["that the target did not accept"] += 1
                continue
            self.tally.note(bundle, outcome)
            if outcome.name != "equal":
                self.say(f"{bundle.id} {outcome.name}: {outcome.words}")
            if self.metrics_file is not None:
                write_whole(self.metrics_file, as_metrics(self.tally))

    async def _replayed(self, client: ReplayClient, bundle: Bundle) -> CanaryOutcome | None:
        """Replay a bundle; None if the target refused it for lack of capacity. Raises PillionError after MAX_REFUSED
        refusals in a row."""
        try:
            info = model_of(bundle, self._models, self.model, any_model=True)
            request = request_of(bundle, info, priority=MAX_PRIORITY)
            replayed = await client.answer(request, bundle, info, timeout_s=REPLAY_TIMEOUT_S)
        except (errors.Overloaded, errors.Unavailable, errors.DeadlineExceeded):
            self._refused += 1
            if self._refused >= MAX_REFUSED:
                raise
            await asyncio.sleep(RETRY_S)
            return None
        except (errors.Unauthenticated, errors.PermissionDenied):
            raise
        except errors.PillionError as error:
            return CanaryOutcome(name="error", words=error.message)
        self._refused = 0
        if not replayed.same_prompt:
            return CanaryOutcome(name="prompt", words="the target makes another prompt of the same messages")
        difference = first_difference(bundle.answers, replayed.answers)
        distance, compared_tokens = logprob_distance(bundle.answers, replayed.answers)
        then_ms = bundle.timings.total_ms if bundle.timings is not None else 0.0
        return CanaryOutcome(
            name="equal" if difference is None else "differs",
            words="" if difference is None else str(difference),
            position=None if difference is None else difference.position,
            distance=distance,
            compared_tokens=compared_tokens,
            slower=replayed.timings.total_ms / then_ms if replayed.timings is not None and then_ms else None,
        )


def as_metrics(tally: CanaryTally) -> str:
    """Return the current figures in Prometheus' text format."""
    rows, verdict = tally.rows, tally.verdict()
    counts: dict[tuple[str, ...], float] = {
        (*row, outcome): count for row, one in rows.items() for outcome, count in one.counts.items()
    }
    distances = {row: one.mean_distance for row, one in rows.items() if one.mean_distance is not None}
    ratios = {row: one.median_slower for row, one in rows.items() if one.median_slower is not None}
    kinds, promote = ("model", "kind"), -1 if verdict is None else int(verdict)
    return gauge_page(
        {
            "pillion_canary_requests": GaugeSeries("Replays by outcome.", (*kinds, "outcome"), counts),
            "pillion_canary_logprob_distance": GaugeSeries("Mean difference of log probabilities.", kinds, distances),
            "pillion_canary_time_ratio": GaugeSeries(
                "Median ratio of the replays' times to the requests'.", kinds, ratios
            ),
            "pillion_canary_promote": GaugeSeries("1: promote, 0: stop, -1: undecided.", (), {(): promote}),
        }
    )


def table_rows(tally: CanaryTally) -> list[tuple[str, ...]]:
    """Return the cells of the result's table: a row per model and kind of request, and one for all."""
    rows = []
    for row, one in (*sorted(tally.rows.items()), (("all", ""), tally.all)):
        counts = (one.requests, *(one.counts[name] for name in ("equal", "differs", "prompt", "error")))
        first = str(min(one.positions)) if one.positions else ""
        distance, slower = ("" if value is None else f"{value:.3g}" for value in (one.mean_distance, one.median_slower))
        rows.append((*row, *map(str, counts), first, distance, slower))
    return rows
