"""One drill: strikes a component of each kind of a cluster in turn, under its own load.

    status --> refused (ConfigError): something is amiss, or a spare is missing
       |
    the load streams --> strike --> as many components serve as before --> all its streams have ended --> the next one

It measures what clients and operators see: the streams of its own load, and the gateway's status.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pillion.client.client import Client
from pillion.drill.contract import KINDS, Contract, StrikeCost
from pillion.drill.report import StrikeReport
from pillion.drill.streams import BEGINS_WITHIN_S, StreamLoad, pauses_of
from pillion.drill.strikes import Striker, refusals, victims, with_sockets
from pillion.errors import ConfigError, PillionError, Unavailable
from pillion.types import ClusterStatus, ComponentStatus

POLL_INTERVAL_S = 0.25
# Time for a restarted KV node to recover the blocks of its previous process, after all affected streams have ended.
RECOVERED_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillPlan:
    """Plan of a drill.

    Attributes:
        reach: arguments of :class:`pillion.Client`.
        contract: the contract per kind of component.
        kinds: kinds to strike; (): all in the status. Redis behind a --kill command is only struck by name.
        pause_s: how long to stop each component; 0: kill it.
        streams, prompt_tokens, answer_tokens, model: the drill's own load; answers vary by half around answer_tokens.
        within_s: time for the load to begin streaming, and for the cluster and the streams to recover from each strike.
    """

    reach: dict[str, Any]
    contract: dict[str, Contract]
    striker: Striker
    kinds: tuple[str, ...] = ()
    pause_s: float = 0.0
    streams: int = 4
    prompt_tokens: int = 256
    answer_tokens: int = 128
    model: str = ""
    within_s: float = 120.0

    @property
    def how(self) -> str:
        """What happens to a component."""
        return f"paused for {self.pause_s:g} s" if self.pause_s else "killed"


def choose_victims(plan: DrillPlan) -> list[ComponentStatus]:
    """Return the components to strike, in order. Raises ConfigError with the reasons if the drill may not begin."""
    if plan.pause_s and plan.striker.kill and "{signal}" not in plan.striker.kill:
        raise ConfigError("the drill does not start: --pause-s needs a --kill command with {signal} in it")
    try:
        components: Sequence[ComponentStatus] = _status(plan).components
    except PillionError as error:
        raise ConfigError(f"the drill does not start: {error.message}") from None
    if not plan.striker.kill:
        components = with_sockets(components)
    elif "redis" in plan.kinds:
        components = [*components, ComponentStatus(component_id="redis", role="redis")]
    chosen = victims(components, plan.kinds or KINDS)
    if plan.striker.kill and "{component}" not in plan.striker.kill:
        chosen = [replace(one, component_id=one.role) for one in chosen]
    if wrong := list(refusals(components, chosen, plan.striker)):
        raise ConfigError(f"the drill does not start: {'; '.join(wrong)}")
    return chosen


def run_drill(plan: DrillPlan, chosen: Sequence[ComponentStatus]) -> Iterator[StrikeReport]:
    """Strike one component after the other; yield a report of each. Raises ConfigError if the load does not stream
    before the first strike; Unavailable if it does not before a later one, or if a component cannot be struck."""
    load = StreamLoad(
        prompt_tokens=plan.prompt_tokens,
        answer_tokens=plan.answer_tokens,
        count=plan.streams,
        model=plan.model,
        **plan.reach,
    )
    try:
        for number, victim in enumerate(chosen):
            # Wait for streams on all threads, so that the strike hits some mid-answer.
            if not _until(plan.within_s, lambda: _streaming(load)):
                error = next((one.error for one in reversed(load.streams) if one.error), "no error was reported")
                text = f"the drill's own streams brought nothing within {plan.within_s:g} s: {error}"
                raise (Unavailable if number else ConfigError)(text)
            yield _strike(plan, victim, load)
    finally:
        load.close()


def _streaming(load: StreamLoad) -> bool:
    return sum(bool(one.token_s) and not one.over for one in load.streams) >= load.count


def _strike(plan: DrillPlan, victim: ComponentStatus, load: StreamLoad) -> StrikeReport:
    """Strike a component, wait for the cluster to recover, and return the cost."""
    before = _status(plan)
    over = {id(one) for one in load.streams if one.over}
    began_s = time.monotonic()
    _hit(plan, victim)
    struck_s = time.monotonic()
    blocks: dict[str, int] = {}
    recovered = _until(plan.within_s, lambda: _is_full_strength(plan, before, struck_s, blocks))
    recovered_s = time.monotonic()
    affected = [one for one in load.streams if one.asked_s < recovered_s and id(one) not in over]
    _until(plan.within_s, lambda: all(one.over for one in affected))
    blocks_before = {one.component_id: one.committed_blocks for one in before.components if one.role == "kvnode"}
    _until(RECOVERED_WITHIN_S, lambda: _blocks_recovered(plan, blocks_before, blocks))
    in_flight = [one for one in affected if one.asked_s < began_s]
    pauses, _ = pauses_of(in_flight, began_s, BEGINS_WITHIN_S + struck_s - began_s)
    lost = [one.error or f"it has not ended {plan.within_s:g} s later" for one in affected if one.error or not one.over]
    cost = StrikeCost(
        longest_pause_ms=round(max(pauses, default=0.0) * 1000, 1),
        recomputed_tokens=sum(one.recomputed_tokens for one in affected),
        lost_blocks=sum(max(0, count - blocks.get(name, 0)) for name, count in blocks_before.items()),
        lost_streams=len(lost),
        full_strength_s=round(recovered_s - began_s, 2) if recovered else math.inf,
    )
    moved = sum(one.replays > 0 for one in in_flight)
    broken = plan.contract[victim.role].broken_by(cost)
    return StrikeReport(
        victim.role, victim.component_id, plan.how, cost, len(in_flight), moved, broken, tuple(dict.fromkeys(lost))
    )


def _hit(plan: DrillPlan, victim: ComponentStatus) -> None:
    """Kill a component, or stop it for a while. In any case, continue a stopped one, and restart a killed one if that
    is the drill's task."""
    if not plan.pause_s:
        try:
            plan.striker.send(victim, signal.SIGKILL)
        finally:
            plan.striker.start_again(victim)
        return
    plan.striker.send(victim, signal.SIGSTOP)
    try:
        time.sleep(plan.pause_s)
    finally:
        plan.striker.send(victim, signal.SIGCONT)


def _status(plan: DrillPlan) -> ClusterStatus:
    """Return the cluster's status. Raises PillionError if no gateway answers."""
    with Client(**plan.reach, connect_timeout_s=0.0) as client:
        return client.status()


def _is_full_strength(plan: DrillPlan, before: ClusterStatus, struck_s: float, blocks: dict[str, int]) -> bool:
    """Return whether as many components of each kind and model as ``before`` have sent a heartbeat since the strike.
    Updates ``blocks`` by KV node."""
    since_ms = (time.monotonic() - struck_s) * 1000
    try:
        status = _status(plan)
    except PillionError:
        return False
    fresh = [one for one in status.components if one.heartbeat_age_ms < since_ms and not one.trouble]
    _note_blocks(fresh, blocks)
    return status.index_available and _strength(fresh) >= _strength(before.components)


def _blocks_recovered(plan: DrillPlan, blocks_before: dict[str, int], blocks: dict[str, int]) -> bool:
    """Return whether each KV node has had at least as many blocks as in ``blocks_before`` since the strike."""
    with contextlib.suppress(PillionError):
        _note_blocks(_status(plan).components, blocks)
    return all(blocks.get(name, 0) >= count for name, count in blocks_before.items())


def _note_blocks(components: Sequence[ComponentStatus], blocks: dict[str, int]) -> None:
    """Update the max number of blocks per KV node since the strike; a node recovers those of its previous process
    gradually."""
    for one in components:
        if one.role == "kvnode":
            blocks[one.component_id] = max(blocks.get(one.component_id, 0), one.committed_blocks)


def _strength(components: Sequence[ComponentStatus]) -> Counter[tuple[str, str]]:
    return Counter((one.role, one.model) for one in components)


def _until(within_s: float, reached: Callable[[], bool]) -> bool:
    """Poll until ``reached()`` is true; return False if it is not within ``within_s``."""
    until_s = time.monotonic() + within_s
    while not reached():
        if time.monotonic() > until_s:
            return False
        time.sleep(POLL_INTERVAL_S)
    return True
