"""Which part of an attention model's prefix hits a hybrid model has, whose texts go on only where a state was kept.

    python -m lab.benchmarks.state_hits                                 traces with Mooncake's statistics
    python -m lab.benchmarks.state_hits --trace conversation_trace.jsonl

Each request of a trace opens a ticket at the ledger of one KV node (:mod:`pillion.kvstore.ledger`), commits what it
does not find, and lets go of the ticket when its answer would have ended. This is done with blocks alone, in a pool for
the KV of ``--pool-tokens``, and with states in a pool that is a tenth larger. These are kept as a worker keeps them
(:mod:`pillion.engine.scheduling.state_places`, and the end of an answer), and evicted as a node evicts them
(:mod:`pillion.kvstore.ledger.state_eviction`), whose share of the pool is bounded by ``--state-percent`` or by 10.
Working states of running sequences are in neither.

A trace knows prompts by blocks of 512 tokens, so states at prompts' ends stand after the last whole one, which is where
the next turn finds them. Answers are nobody's prefix in a trace: their states take room, and are never found. In a
service the state at an answer's end is found and that at its prompt's end is not, which makes the same number.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import itertools
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table

from lab.benchmarks.mooncake import WORKLOADS, generate_like
from lab.benchmarks.report import save, show_table
from pillion.kvstore.hashing import state_page
from pillion.kvstore.ledger.integrity import check_integrity
from pillion.kvstore.ledger.ledger import Ledger, PoolShares, TicketState
from pillion.loadgen.traces import TRACE_BLOCK_TOKENS, TraceRequest, read_trace
from pillion.v1.kvnode_pb2 import CommitRun

# Tokens of a block: the larger, the faster; a state takes whole blocks.
BLOCK_TOKENS = 64
# Bytes of a state over bytes of a token's KV, in bfloat16 and with states in float32.
STATE_TOKENS = {"LFM2-1.2B": 6, "Qwen3-Next-80B": 3000}
# A pool may be so much larger for states.
MORE_PERCENT = 10
# How long a request holds its ticket: seconds for a token of its prompt and of its answer.
PROMPT_TOKEN_S, ANSWER_TOKEN_S = 1 / 20_000, 0.03


@dataclass(slots=True)
class TraceHits:
    """What a trace found. ``kept`` states were committed, and ``evicted`` ones left."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    kept: int = 0
    evicted: int = 0


class TraceNode:
    """The ledger of a node, whose requests keep states of so many pages (0: none), which may have a share of the
    pool."""

    def __init__(self, slots: int, pages: int, state_percent: int) -> None:
        self.ledger = Ledger(itertools.count(1).__next__, 0, PoolShares(state_percent=state_percent))
        self.ledger.shape(slots)
        self.pages, self.hits = pages, TraceHits()
        self._worker = self.ledger.attach("worker", "decode")
        self._nonces = itertools.count(1)
        self._ends: list[tuple[float, int, int]] = []

    def serve(self, request: TraceRequest) -> None:
        """Serves a request at its time; where memory is short it waits for the requests that end first."""
        now = request.timestamp / 1000
        while self._ends and self._ends[0][0] <= now:
            self._end()
        # At least one token is computed.
        whole = request.hash_ids[: (request.input_length - 1) // TRACE_BLOCK_TOKENS]
        hashes = list(_hashes(whole))
        answer = request.output_length // BLOCK_TOKENS
        total = len(hashes) + answer + 1
        while (ticket := self.ledger.admit(self._worker, next(self._nonces), hashes, total, self.pages)) is None:
            self._end()
        self.hits.prompt_tokens += request.input_length
        self.hits.hit_tokens += ticket.blocks * BLOCK_TOKENS
        known = ticket.known_blocks
        for end in sorted({known, len(hashes)} if self.pages else {len(hashes)}):
            if end > ticket.blocks:
                self._commit(ticket, hashes[ticket.blocks : end])
                self._keep(ticket)
        seconds = request.input_length * PROMPT_TOKEN_S + request.output_length * ANSWER_TOKEN_S
        heapq.heappush(self._ends, (now + seconds, ticket.ticket_id, answer))

    def _end(self) -> None:
        """Ends the answer that ends first: its blocks, and the state after them."""
        _, ticket_id, answer = heapq.heappop(self._ends)
        ticket = self.ledger.tickets[ticket_id]
        self._commit(ticket, [hashlib.sha256(b"%d %d" % (ticket_id, at)).digest() for at in range(answer)])
        if answer:
            self._keep(ticket)
        self.ledger.release(self._worker, [ticket_id])

    def _commit(self, ticket: TicketState, names: Sequence[bytes]) -> None:
        if names:
            slots = self.ledger.adopt(self._worker, ticket.ticket_id, len(names)).leased_slots
            self._send(CommitRun(ticket_id=ticket.ticket_id, slots=slots, block_hashes=b"".join(names)))

    def _keep(self, ticket: TicketState) -> None:
        """Keeps the state after the ticket's last block, where there are slots for it."""
        if not self.pages or ticket.last_block is None:
            return
        slots = self.ledger.lease(self._worker, self.pages)
        if len(slots) < self.pages:
            self.ledger.give_back(self._worker, slots)
            return
        after = ticket.last_block.hash
        names = b"".join(state_page(after, page) for page in range(self.pages))
        self._send(CommitRun(ticket_id=ticket.ticket_id, slots=slots, block_hashes=names, after=after))
        self.hits.kept += 1
        self.hits.evicted = self.ledger.states.evicted_states

    def _send(self, run: CommitRun) -> None:
        [result] = self.ledger.commit(self._worker, [run])
        assert not result.refusal, result.refusal
        self.ledger.give_back(
            self._worker, [own for own, kept in zip(run.slots, result.slots, strict=True) if own != kept]
        )
        self.ledger.drain_events()


def _hashes(trace_blocks: Sequence[int]) -> Iterator[bytes]:
    for number in trace_blocks:
        for part in range(TRACE_BLOCK_TOKENS // BLOCK_TOKENS):
            yield hashlib.sha256(b"%d.%d" % (number, part)).digest()


def replayed(
    trace: Sequence[TraceRequest], pool_tokens: int, state_tokens: int = 0, state_percent: int = 0
) -> TraceHits:
    """Serves a trace; with ``state_tokens`` above 0 by a hybrid model."""
    slots = pool_tokens // BLOCK_TOKENS
    more = slots * MORE_PERCENT // 100 if state_tokens else 0
    node = TraceNode(slots + more, -(-state_tokens // BLOCK_TOKENS), state_percent)
    for request in trace:
        node.serve(request)
    check_integrity(node.ledger)
    return node.hits


def main() -> None:
    """Replay, print, write results/state_hits.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=pathlib.Path, help="a trace in Mooncake's form, in place of made ones")
    parser.add_argument("--requests", type=int, default=2000, help="requests of each trace")
    parser.add_argument("--pool-tokens", type=int, nargs="+", default=[2_000_000, 8_000_000])
    parser.add_argument("--state-percent", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", default="state_hits", help="name of the result file")
    args = parser.parse_args()
    if args.trace is not None:
        traces = {args.trace.stem: read_trace(args.trace)[: args.requests]}
    else:
        names = ("conversation", "toolagent")
        traces = {name: generate_like(WORKLOADS[name], args.seed, args.requests) for name in names}
    table = Table("trace", "pool, tokens", "model", "state percent", "attention alone", "with states", "share")
    rows = []
    for (name, trace), pool_tokens in itertools.product(traces.items(), args.pool_tokens):
        alone = replayed(trace, pool_tokens)
        for (model, state_tokens), percent in itertools.product(STATE_TOKENS.items(), args.state_percent):
            found = replayed(trace, pool_tokens, state_tokens, percent)
            share = found.hit_tokens / alone.hit_tokens
            whole, own = (one.hit_tokens / one.prompt_tokens for one in (alone, found))
            shown = f"{whole:.1%}", f"{own:.1%}", f"{share:.1%}"
            table.add_row(name, f"{pool_tokens:,}", model, str(percent), *shown)
            rows.append(
                {
                    "trace": name,
                    "requests": len(trace),
                    "pool_tokens": pool_tokens,
                    "model": model,
                    "state_percent": percent,
                    "hits_of_attention": whole,
                    "hits": own,
                    "share": share,
                    "states_kept": found.kept,
                    "states_evicted": found.evicted,
                }
            )
    show_table(table)
    print(save(args.name, {"block_tokens": BLOCK_TOKENS, "more_percent": MORE_PERCENT, "rows": rows}))


if __name__ == "__main__":
    main()
