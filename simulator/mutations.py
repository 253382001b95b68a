"""Defects made by hand, to see that the checks find them: each takes one rule out of the production code for a while.

A check that misses one of these would miss a real one like it. The names say what is left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

from pillion.engine.scheduling.in_flight import InFlightSteps
from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.step_cost import TokenBudget
from pillion.gateway.admission.admission import Admission
from pillion.gateway.links.decode_link import DecodeLink
from pillion.gateway.links.load_exchange import OwnLoad
from pillion.gateway.links.node_link import NodeLink
from pillion.gateway.request import events as ev
from pillion.gateway.request.component_calls import ComponentCalls
from pillion.gateway.request.request_machine import RequestMachine
from pillion.kvstore.client.node_client import NodeClient
from pillion.kvstore.ledger.ledger import Ledger
from pillion.kvstore.ledger.tree import BlockTree
from pillion.kvstore.node.pool import Pool
from pillion.kvstore.transfer.grpc_plane import GrpcPlane
from pillion.simulator.step_driver import VirtualStepLoop

Mutation = Callable[[], AbstractContextManager[object]]


def _instead(owner: Any, name: str, made: Callable[[Any], Any]) -> Mutation:
    """Replaces a method by what ``made`` makes of it."""
    return lambda: mock.patch.object(owner, name, made(getattr(owner, name)))


def _fence_frees(fence: Any) -> Any:
    def mutant(self: Any, epoch: int) -> None:
        fence(self, epoch)
        holder = self.ledger.holders.get(self._last_epoch.get(epoch, epoch))
        if holder is not None:
            self.ledger._free(holder, list(holder.leased))

    return mutant


def _fence_unpins(fence: Any) -> Any:
    def mutant(self: Any, epoch: int) -> None:
        fence(self, epoch)
        holder = self.holders.get(epoch)
        for ticket_id in list(holder.tickets) if holder is not None else ():
            self._let_go(holder, self.tickets[ticket_id])

    return mutant


def _adopt_without_hold(adopt: Any) -> Any:
    def mutant(self: Any, epoch: int, ticket_id: int, lease_blocks: int) -> Any:
        found = adopt(self, epoch, ticket_id, lease_blocks)
        ticket = self.tickets[ticket_id]
        if len(ticket.holders) > 1:
            ticket.holders.discard(epoch)
            self.holders[epoch].tickets.discard(ticket_id)
        return found

    return mutant


def _release_at_submit(go_on: Any) -> Any:
    def mutant(self: Any, blocks: int, now: float) -> Any:
        actions = go_on(self, blocks, now)
        if any(isinstance(action, ev.SubmitDecode) for action in actions):
            return [*actions, *self._release_ticket()]
        return actions

    return mutant


def _old_attempts_count(handle: Any) -> Any:
    def mutant(self: Any, event: Any, now: float) -> Any:
        if isinstance(event, ev.TokensSampled | ev.DecodeFinished) and event.attempt != self.attempt:
            event = replace(event, attempt=self.attempt)
        return handle(self, event, now)

    return mutant


def _seed_of_attempt(submit: Any) -> Any:
    def mutant(self: Any, action: Any, followers: Any) -> Any:
        before = self._seed
        self._seed = before + action.attempt - 1
        try:
            return submit(self, action, followers)
        finally:
            self._seed = before

    return mutant


def _nothing(_: Any) -> Any:
    return lambda *_, **__: None


def _async_nothing(_: Any) -> Any:
    async def mutant(*_: Any, **__: Any) -> None:
        return None

    return mutant


def _cancel_frees_nothing(_: Any) -> Any:
    def mutant(self: Any, seq_id: int, now: float) -> None:
        sequence = self.sequences.get(seq_id)
        if sequence is not None and not sequence.end_reported:
            sequence.report_end(now)

    return mutant


def _lost_silently(_: Any) -> Any:
    def mutant(self: Any, reason: str) -> None:
        self._commands, self._sinks = None, {}

    return mutant


def _one_more_token(left: Any) -> Any:
    return lambda self, *args, **more: left(self, *args, **more) + 1


def _drafts_are_right(accept: Any) -> Any:
    def mutant(self: Any, chosen: Any, now: float) -> Any:
        drafts = self.drafts().tolist()
        return accept(self, (*drafts, *chosen[len(drafts) :]) if drafts else chosen, now)

    return mutant


def _awaits_nothing(_: Any) -> Any:
    async def mutant(self: Any, epoch: int, ticket_id: int, blocks: int, timeout_s: float) -> Any:
        return self.ledger.chain_of(self.ledger.held(epoch, ticket_id))

    return mutant


def _slots_crossed(read: Any) -> Any:
    async def mutant(self: Any, source: Any, stream: Any, ticket_id: int, remote: Any, local: Any) -> None:
        await read(self, source, stream, ticket_id, remote, tuple(reversed(local)))

    return mutant


def _commit_twice(seal: Any) -> Any:
    def mutant(self: Any, holder: Any, ticket: Any, slot: int, block_hash: bytes) -> int:
        known = self.tree.by_hash.get(block_hash)
        stays: int = seal(self, holder, ticket, slot, block_hash)
        if known is not None:
            self._free(holder, [slot])
        return stays

    return mutant


@contextlib.contextmanager
def _unpinned_eviction() -> Iterator[None]:
    """A chain's tail is protected, and its other blocks are not."""
    pin = BlockTree.pin

    def mutant(self: Any, block: Any) -> None:
        pin(self, block)
        if block.parent is not None and block.parent.holds and not block.parent.children:
            block.parent.holds = 0

    def evict(self: Any) -> Any:
        victims = [block for block in self.by_hash.values() if not block.children and block.holds == 1]
        if victims:
            block = victims[0]
            del self.by_hash[block.hash]
            return block
        return before(self)

    before = BlockTree.evict
    with mock.patch.object(BlockTree, "pin", mutant), mock.patch.object(BlockTree, "evict", evict):
        yield


def _stop_without_landing(_: Any) -> Any:
    async def mutant(self: Any) -> None:
        self.halt()

    return mutant


MUTATIONS: dict[str, Mutation] = {
    "a fence frees what the worker may still write to": _instead(Pool, "fence", _fence_frees),
    "a fence lets go of what the worker still reads": _instead(Ledger, "fence", _fence_unpins),
    "orders do not wait for steps in flight": _instead(InFlightSteps, "hold_back", lambda _: lambda self, out: False),
    "a worker drains without waiting for its step": _instead(VirtualStepLoop, "stop", _stop_without_landing),
    "an adopted ticket is not held": _instead(Ledger, "adopt", _adopt_without_hold),
    "the gateway releases the ticket with the submit": _instead(RequestMachine, "_go_on", _release_at_submit),
    "tokens of older attempts count": _instead(RequestMachine, "handle", _old_attempts_count),
    "a replay begins with the prompt alone": _instead(
        RequestMachine, "tokens", lambda _: lambda self: tuple(self.prompt)
    ),
    "each attempt has a seed of its own": _instead(ComponentCalls, "submit", _seed_of_attempt),
    "a cancelled sequence stays": _instead(Scheduler, "cancel", _cancel_frees_nothing),
    "a lost connection is told to nobody": _instead(DecodeLink, "_lose", _lost_silently),
    "a request that ends keeps its place": _instead(Admission, "leave", _nothing),
    "load is only added": _instead(
        OwnLoad, "add", lambda add: lambda self, name, amount, tokens=0: add(self, name, max(0, amount), max(0, tokens))
    ),
    "releases are forgotten": _instead(NodeLink, "release", _nothing),
    "an abandoned ticket stays": _instead(NodeClient, "_abandon", _nothing),
    "a step has one token too many": _instead(TokenBudget, "left", _one_more_token),
    "all guesses are right": _instead(Sequence, "accept", _drafts_are_right),
    "the hand-off waits for nothing": _instead(Pool, "await_chain", _awaits_nothing),
    "fetched blocks land in each other's slots": _instead(GrpcPlane, "read", _slots_crossed),
    "the loser of a commit gives its slot away at once": _instead(Ledger, "_seal", _commit_twice),
    "pinned blocks are evicted": _unpinned_eviction,
    "slots are not given back": _instead(NodeClient, "give_back", _async_nothing),
}
