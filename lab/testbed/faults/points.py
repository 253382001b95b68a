"""Fault points: before and after each send, commit and acknowledgement of a component.

A seam is a function or method of the product. The points of an asynchronous generator are before and after each message
that it yields; "after" is passed when the reader asks for the next one.
"""

from __future__ import annotations

from dataclasses import dataclass

# Frequency of passes: at start; in some requests; a few times by six requests, or by each; a few times a second; every
# step.
AT_START, SELDOM, FEW = "at start", "seldom", "a few times"
PER_REQUEST, PER_HEARTBEAT, ALWAYS = "per request", "per heartbeat", "always"
# A test draws the pass at which a fault fires from 1 to this number, per frequency.
MAX_PASSINGS = {AT_START: 1, SELDOM: 1, FEW: 3, PER_REQUEST: 6, PER_HEARTBEAT: 5, ALWAYS: 100}

_CLIENT = "pillion.kvstore.client.node_client:NodeClient"
_POOL = "pillion.kvstore.node.pool:Pool"
_LINK = "pillion.gateway.links.decode_link:DecodeLink"
_SESSION = "pillion.engine.streams.stream_session:DecodeSession"
_EPOCH = "pillion.engine.worker.worker_epoch:WorkerEpoch"
_KEEPER = "pillion.kvstore.pool_survival.keeper_process:KeeperServer"
_WORKERS, _GATEWAY, _NODE = ("prefill", "decode"), ("gateway",), ("kvnode",)
# Shapes with a keeper; clusters of several hosts have none.
_WITH_KEEPER = ("small", "wide")

# Shapes of clusters (tests/faults/places.py) whose requests pass the point, if not all.
_ONLY_IN: dict[tuple[str, str], tuple[str, ...]] = {
    ("gateway", "a fetch"): ("nodes", "hosts"),
    ("kvnode", "a fetch"): ("nodes", "hosts"),
    ("keeper", "a hand-over"): _WITH_KEEPER,
    # Passed only by pooling requests; tests arm it by name.
    ("prefill", "a batch of deltas"): (),
    ("keeper", "a keep request"): _WITH_KEEPER,
}
# Roles, event at the seam, the seam's name, and frequency.
_SEAMS: tuple[tuple[tuple[str, ...], str, str, str], ...] = (
    (_GATEWAY, "a look-up", "pillion.kvstore.index.index:Index.longest_prefix", PER_REQUEST),
    (_GATEWAY, "a look at the registry", "pillion.kvstore.index.registry:Registry.components", PER_HEARTBEAT),
    (_GATEWAY, "a session", f"{_CLIENT}.open_session", AT_START),
    (_GATEWAY, "a ticket", f"{_CLIENT}.open_ticket", PER_REQUEST),
    (_GATEWAY, "a fetch", f"{_CLIENT}.prefetch", SELDOM),
    (_GATEWAY, "a release", f"{_CLIENT}.release", FEW),
    (_GATEWAY, "an acknowledged chunk", "pillion.gateway.links.prefill_link:PrefillLink.run_prefill", PER_REQUEST),
    (_GATEWAY, "a submit", f"{_LINK}.submit", PER_REQUEST),
    (_GATEWAY, "a cancel", f"{_LINK}.cancel", SELDOM),
    (_GATEWAY, "a delta", f"{_LINK}._dispatch", ALWAYS),
    (_WORKERS, "its attachment", "pillion.kvstore.client.attachment:attach", AT_START),
    (_WORKERS, "a registration", "pillion.kvstore.index.registry:Registry.heartbeat", PER_HEARTBEAT),
    (_WORKERS, "a heartbeat", f"{_CLIENT}.heartbeat", PER_HEARTBEAT),
    (_WORKERS, "an adoption", f"{_CLIENT}.adopt", FEW),
    (_WORKERS, "a commit", f"{_CLIENT}.commit", FEW),
    (_WORKERS, "a release", f"{_CLIENT}.release", FEW),
    (("prefill",), "a launch", f"{_EPOCH}._launch", PER_REQUEST),
    (("decode",), "a launch", f"{_EPOCH}._launch", ALWAYS),
    (("prefill",), "an acknowledgement", "pillion.prefill_service.prefill_run:PrefillRun.acks", PER_REQUEST),
    (("decode",), "a submit", f"{_SESSION}.submit", PER_REQUEST),
    (("decode",), "a ticket", f"{_CLIENT}.open_ticket", PER_REQUEST),
    (("decode",), "a batch of deltas", f"{_SESSION}.deltas", ALWAYS),
    (("decode",), "a cancel", f"{_SESSION}.cancel", SELDOM),
    (("decode",), "a hand-off", f"{_CLIENT}.await_chain", SELDOM),
    (("decode",), "a lease", f"{_CLIENT}.lease", PER_REQUEST),
    (("decode",), "a return of slots", f"{_CLIENT}.return_slots", FEW),
    (_NODE, "an attachment", f"{_POOL}.attach", AT_START),
    (_NODE, "an end of an epoch", f"{_POOL}.ended", AT_START),
    (_NODE, "a session", f"{_POOL}.open_session", AT_START),
    (_NODE, "a ticket", f"{_POOL}.open_ticket", PER_REQUEST),
    (_NODE, "a fetch", f"{_POOL}.prefetch", SELDOM),
    (_NODE, "an adoption", f"{_POOL}.adopt", PER_REQUEST),
    (_NODE, "a lease", f"{_POOL}.lease", PER_REQUEST),
    (_NODE, "a return of slots", f"{_POOL}.return_slots", FEW),
    (_NODE, "a commit", f"{_POOL}.commit", PER_REQUEST),
    (_NODE, "a hand-off", f"{_POOL}.await_chain", SELDOM),
    (_NODE, "a release", f"{_POOL}.release", PER_REQUEST),
    (_NODE, "a heartbeat", f"{_POOL}.heartbeat", PER_HEARTBEAT),
    (_NODE, "an announcement", "pillion.kvstore.index.redis_writer:IndexWriter.announce", PER_REQUEST),
    (("keeper",), "a hand-over", f"{_KEEPER}._send", AT_START),
    (("keeper",), "a keep request", f"{_KEEPER}._keep", AT_START),
    (("prefill",), "a batch of deltas", f"{_SESSION}.deltas", PER_REQUEST),
)


@dataclass(frozen=True, slots=True)
class FaultPoint:
    """A fault point in components of ``role``. ``seam``: "module:name" or "module:Class.method"; ``number`` > 0."""

    number: int
    role: str
    moment: str
    what: str
    seam: str
    passed: str

    @property
    def name(self) -> str:
        """Name as in test output, e.g. "decode, before a commit"."""
        return f"{self.role}, {self.moment} {self.what}"

    def passed_in(self, shape: str) -> bool:
        """Return whether requests to a cluster of this shape pass the point."""
        return shape in _ONLY_IN.get((self.role, self.what), (shape,))


POINTS: tuple[FaultPoint, ...] = tuple(
    FaultPoint(number, *point)
    for number, point in enumerate(
        (
            (role, moment, what, seam, passed)
            for roles, what, seam, passed in _SEAMS
            for role in roles
            for moment in ("before", "after")
        ),
        start=1,
    )
)
BY_NAME = {point.name: point for point in POINTS}
