"""Defines what a room adds to a worker: from loading beside the model to its end, and its part of the steps of each
epoch.

    start:    load -> warm_up -> step_feature, attached -> bind_pool -> live       (a process that does not stand by
    request:  made_ready -> its sequence is added                                   warms up once it is bound)
    each further epoch:  step_feature                                               end:  close

The table of :mod:`pillion.rooms` says which features there are, in the order in which a step asks them: a feature that
knows tokens for certain stands before one that guesses.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from pillion.adapter_folders import is_adapter_digest
from pillion.config import WorkerFlags
from pillion.engine.backends.loaded_model import BackendFactory, LoadedModel
from pillion.engine.scheduling.step_feature import StepFeature
from pillion.errors import FieldViolation, InvalidRequest
from pillion.kvstore.client.attachment import Attachment
from pillion.rooms import Seam


class StartTurn(Protocol):
    """Says when a process may take part: at once, or, where it stands by, when its turn comes."""

    @property
    def waiting(self) -> bool:
        """Says whether the process's turn has not come yet."""

    def wait(self) -> float:
        """Blocks until the turn has come; returns for how many seconds this process has waited in all."""


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """Holds what a feature needs to be loaded for a worker.

    Attributes:
        model: the worker's model, loaded and bound to no pool.
        max_num_batched_tokens: tokens of the longest step.
        load: loads a further model.
        turn: the process's turn.
    """

    flags: WorkerFlags
    role: str
    model: LoadedModel
    max_num_batched_tokens: int
    load: BackendFactory
    turn: StartTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestNeeds:
    """Says what a request needs beside the model.

    Attributes:
        adapter: digest of the adapter that it runs with; "" for the model alone.
        grammar: the text of the grammar that its answer follows; "" for none.
        answer: tokens of the answer that are there already.
        stop_token_ids: ids that end the stream.
    """

    adapter: str = ""
    grammar: str = ""
    answer: Seq[int] = ()
    stop_token_ids: frozenset[int] = frozenset()

    def check(self) -> None:
        """Raises InvalidRequest for an adapter that is no digest."""
        if self.adapter and not is_adapter_digest(self.adapter):
            raise InvalidRequest.of(FieldViolation("adapter", "the 64 hexadecimal digits of a digest are needed"))


NO_NEEDS = RequestNeeds()


class WorkerFeature:
    """Represents a feature of one worker, such as grammars or adapters; each method does nothing where a feature does
    not override it."""

    def step_feature(self) -> StepFeature:
        """Makes the feature's part of the steps of one epoch."""
        return StepFeature()

    def bind_pool(self, attachment: Attachment) -> None:
        """Notes that the worker's pool is mapped. Raises ConfigError for a pool that the feature cannot use."""

    def warm_up(self, max_tokens: int) -> None:
        """Pays one-time costs of steps of up to so many tokens."""

    def close(self) -> None:
        """Ends everything that the feature has begun. Idempotent."""


LoadWorkerFeature = Callable[[WorkerSetup], Awaitable[WorkerFeature | None]]
# Rooms add features to a worker here; a room returns None where the flags do not ask for it.
WORKER_FEATURES = Seam[LoadWorkerFeature]("engine.worker.features")
