"""Mutants of the product that the checks must find: each removes one rule from the production code for a while, or from
the task that replaces a worker's step thread.

A check that misses one would miss a real defect like it. Names say what is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from lab.simulator.step_driver import VirtualStepLoop
from pillion.engine.scheduling.in_flight import InFlightSteps, _LaunchedStep
from pillion.engine.scheduling.parallel_samples import ParallelSampling
from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.step_cost import TailRoom
from pillion.engine.scheduling.step_plan import Outcome
from pillion.engine.worker.heartbeat import EpochTerm
from pillion.gateway.admission.admission import Admission
from pillion.gateway.gateway_server import GatewayServer
from pillion.gateway.links.decode_link import DecodeLink
from pillion.gateway.links.load_exchange import OwnLoad
from pillion.gateway.links.node_link import NodeLink
from pillion.gateway.request import component_calls
from pillion.gateway.request import events as ev
from pillion.gateway.request.component_calls import ComponentCalls
from pillion.gateway.request.request_machine import RequestMachine, RequestState
from pillion.kvstore.client.node_client import NodeClient
from pillion.kvstore.exchange.plane import DataPlane
from pillion.kvstore.hashing import request_root
from pillion.kvstore.ledger.ledger import Ledger
from pillion.kvstore.node.pool import Pool
from pillion.kvstore.tiers.disk_tier.disk_files import BlockFiles
from pillion.kvstore.tiers.tiers import CorruptBlock
from pillion.kvstore.transfer.fetch import Fetcher

Mutation = Callable[[], AbstractContextManager[object]]


def _instead(owner: Any, name: str, made: Callable[[Any], Any]) -> Mutation:
    """Replace a method by ``made(method)`` within the context."""
    return lambda: mock.patch.object(owner, name, made(getattr(owner, name)))


def _fence_frees(fence: Any) -> Any:
    def mutant(self: Any, epoch: int) -> None:
        fence(self, epoch)
        holder = self.ledger.holders.get(self._replaced.get(epoch, (0, epoch))[1])
        if holder is not None:
            self.ledger._free(holder, list(holder.leased))

    return mutant


def _fence_unpins(fence: Any) -> Any:
    def mutant(self: Any, epoch: int) -> None:
        fence(self, epoch)
        holder = self.holders.get(epoch)
        for ticket_id in list(holder.tickets) if holder is not None else ():
            self._release(holder, self.tickets[ticket_id])

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


def _release_at_submit(start_compute: Any) -> Any:
    def mutant(self: Any, blocks: int, now: float) -> Any:
        actions = start_compute(self, blocks, now)
        if any(isinstance(action, ev.SubmitDecode) for action in actions):
            return [*actions, *self._release_ticket()]
        return actions

    return mutant


def _seed_of_attempt(submit: Any) -> Any:
    def mutant(self: Any, action: Any, followers: Any) -> Any:
        seed = ComponentCalls._seed
        with mock.patch.object(ComponentCalls, "_seed", lambda calls: seed(calls) + action.attempt - 1):
            return submit(self, action, followers)

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
    def mutant(self: Any, reason: str, broke: bool) -> None:
        self._commands, self._sinks = None, {}

    return mutant


def _one_more_token(at: Any) -> Any:
    return lambda self, start: at(self, start) + 1


def _proposals_are_right(accept: Any) -> Any:
    def mutant(self: Any, chosen: Any, now: float) -> Any:
        proposed = self.proposed().tolist()
        return accept(self, (*proposed, *chosen[len(proposed) :]) if proposed else chosen, now)

    return mutant


def _awaits_nothing(_: Any) -> Any:
    async def mutant(self: Any, epoch: int, ticket_id: int, blocks: int, timeout_s: float) -> Any:
        return self.ledger.chain_of(self.ledger.held(epoch, ticket_id))

    return mutant


def _slots_crossed() -> AbstractContextManager[object]:
    read = DataPlane.read

    async def crossed(self: Any, source: Any, stream: Any, ticket_id: int, remote: Any, local: Any) -> None:
        await read(self, source, stream, ticket_id, remote, tuple(reversed(local)))

    async def all_good(self: Any, source: Any, slots: Any, sums: Any) -> int:
        return len(slots)

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(DataPlane, "read", crossed))
    stack.enter_context(mock.patch.object(Fetcher, "_count_good", all_good))
    return stack


def _admitted_unpinned(admit: Any) -> Any:
    def mutant(self: Any, *args: Any) -> Any:
        ticket = admit(self, *args)
        if ticket is not None and ticket.last_block is not None:
            self.tree.unpin(ticket.last_block)
        return ticket

    return mutant


def _released_by_number(release: Any) -> Any:
    def mutant(self: Any, epoch: int, ticket_ids: Any = (), nonces: Any = ()) -> None:
        opened = [self.by_opener[epoch, nonce].ticket_id for nonce in nonces if (epoch, nonce) in self.by_opener]
        release(self, epoch, [*ticket_ids, *opened])

    return mutant


def _dead_workers_stay(gone: Any) -> Any:
    def mutant(self: Any, epoch: int) -> None:
        holder = self.holders.get(epoch)
        if holder is None or holder.role != "decode":
            gone(self, epoch)

    return mutant


def _no_copies(start: Any) -> Any:
    def mutant(self: Any, *args: Any) -> Any:
        pieces, _ = start(self, *args)
        return pieces, []

    return mutant


def _rejected_stay(accept: Any) -> Any:
    def mutant(self: Any, chosen: Any, now: float) -> Any:
        computed = self.num_computed
        found = accept(self, chosen, now)
        self.num_computed = min(computed, self.num_tokens)
        return found

    return mutant


def _salt_ignored() -> AbstractContextManager[object]:
    def mutant(namespace: bytes, adapter: str, salt: str, **more: Any) -> bytes:
        return request_root(namespace, adapter, "", **more)

    return mock.patch.object(component_calls, "request_root", mutant)


def _reports_turned(report: Any) -> Any:
    def mutant(self: Any, sequence: Any, chosen: Any, *rest: Any) -> None:
        reports = [one for _, one in reversed(chosen)]
        report(self, sequence, [(token, one) for (token, _), one in zip(chosen, reports, strict=True)], *rest)

    return mutant


def _commit_twice(seal: Any) -> Any:
    def mutant(self: Any, holder: Any, ticket: Any, slot: int, block_hash: bytes, page: bool = False) -> int:
        known = self.tree.by_hash.get(block_hash)
        stays: int = seal(self, holder, ticket, slot, block_hash, page)
        if known is not None:
            self._free(holder, [slot])
        return stays

    return mutant


def _stop_without_landing(_: Any) -> Any:
    async def mutant(self: Any) -> None:
        self.halt()

    return mutant


def _read_unverified(read: Any) -> Any:
    def mutant(self: Any, *args: Any) -> None:
        with contextlib.suppress(CorruptBlock):
            read(self, *args)

    return mutant


def _waits_for_ever(_: Any) -> Any:
    async def mutant(*_: Any) -> None:
        await asyncio.Event().wait()

    return mutant


MUTATIONS: dict[str, Mutation] = {
    "a fence frees what the worker may still write to": _instead(Pool, "fence", _fence_frees),
    "a fence lets go of what the worker still reads": _instead(Ledger, "fence", _fence_unpins),
    "orders do not wait for steps in flight": _instead(InFlightSteps, "hold_back", lambda _: lambda self, out: False),
    "a term lasts for ever": _instead(EpochTerm, "valid", lambda _: lambda self: True),
    "a worker drains without waiting for its step": _instead(VirtualStepLoop, "stop", _stop_without_landing),
    "an adopted ticket is not held": _instead(Ledger, "adopt", _adopt_without_hold),
    "the gateway releases the ticket with the submit": _instead(RequestMachine, "_start_compute", _release_at_submit),
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
    "what an abandoned call has leased stays leased": _instead(Ledger, "release", _released_by_number),
    "a step has one token too many": _instead(TailRoom, "at", _one_more_token),
    "all draft tokens are right": _instead(Sequence, "accept", _proposals_are_right),
    "the hand-off waits for nothing": _instead(Pool, "await_chain", _awaits_nothing),
    "fetched blocks land in each other's slots, and are not verified": _slots_crossed,
    "the loser of a commit gives its slot away at once": _instead(Ledger, "_seal", _commit_twice),
    "a ticket opens without its pin": _instead(Ledger, "admit", _admitted_unpinned),
    "a dead worker's slots are kept": _instead(Ledger, "end_epoch", _dead_workers_stay),
    "a parallel sample's half block is not copied": _instead(ParallelSampling, "start_running", _no_copies),
    "the KV of wrong draft tokens counts": _instead(Sequence, "accept", _rejected_stay),
    "a void step counts": _instead(_LaunchedStep, "counts", lambda _: lambda self, piece, generation: True),
    "salts do not keep caches apart": _salt_ignored,
    "a replay scores its prompt anew": lambda: mock.patch.dict(
        RequestMachine._HANDLERS,
        {(RequestState.DECODING, ev.PromptScored): lambda self, event, now: [ev.EmitScores(event.logprobs)]},
    ),
    "log probabilities of several tokens are turned round": _instead(Outcome, "report_tokens", _reports_turned),
    "slots are not given back": _instead(NodeClient, "return_slots", _async_nothing),
    "what comes back is offered a request, and not waited for": _instead(
        ComponentCalls, "_wait_limit_s", lambda _: lambda self, *args: 0.0
    ),
    "a block from disk is not verified": _instead(BlockFiles, "read", _read_unverified),
    "a gateway that stops waits for its streams for ever": _instead(GatewayServer, "_drained", _waits_for_ever),
}
