"""A model whose next token is a hash of all tokens before it, read back from the pool, and the checks of its memory.

    cell of position p = mix(cell of position p - 1, token, p)      the KV of a token: identifies the whole history
    token after p     = a hash of cell p, of the seed and of p     greedy: of cell p alone
    its log probability = a hash of cell p and of the token         the likeliest ones: of cell p alone

With ``repeats``, three of four tokens are the next one of a short cycle, so that drafts from the history are often
accepted, and often rejected.

A step reads every cell of a context through its block table and recomputes it from the previous cell: a block of
another prompt, a lost or stale one, or one with a second writer shows at once, as does a wrong, missing or repeated
token. A whole block with the bytes and previous cell of its last computation is not recomputed. The watch also
compares with the node's ledger: a step that accesses a slot that its worker does not own is a finding even if the
bytes are right (I4).
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from pillion.engine.backends.backend import KVLayout
from pillion.engine.backends.loaded_model import LoadedModel
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.errors import ConfigError
from pillion.kernels.step import MIN_TEMPERATURE, Sampled, SamplingRows, StepBatch
from pillion.types import TokenLogprob

VOCAB_SIZE = 251
# Cycle of tokens in repeating answers.
CYCLE_TOKENS = 6
CELL_BYTES = 16
MODEL_NAME = "hash"
FINGERPRINT = "5e" * 32
_MASK = 2**63 - 1
_MULTIPLIER = 0x5851F42D4C957F2D
_FINISHER = 0x2545F4914F6CDD1D


def mix(before: int, token: int, position: int) -> int:
    """Return the cell of a position, 63 bits, never 0."""
    return (((before ^ (token + 1) * _FINISHER) * _MULTIPLIER + position) & _MASK) | 1


def token_after(cell: int, last: int, seed: int, position: int, greedy: bool, repeats: bool) -> int:
    """Return the token after a position, whose own token is ``last``."""
    value = cell if greedy else mix(cell, seed & 0xFFFF_FFFF, position)
    chosen = (value * _FINISHER & _MASK) >> 40
    if repeats and chosen % 4:
        return (last + 1) % CYCLE_TOKENS
    return chosen // 4 % VOCAB_SIZE


def report_of(cell: int, token: int, alternatives: int) -> TokenLogprob:
    """Return a token's log probability after a position, and the likeliest tokens there: exact in 32 bits."""
    first = (cell * _FINISHER & _MASK) >> 20
    places = range(alternatives)
    return TokenLogprob(
        token,
        -(mix(cell, token, 0) >> 20 & 0xFFF) / 256,
        tuple((first + place) % VOCAB_SIZE for place in places),
        tuple(-place / 4 for place in places),
    )


def reference_reports(tokens: Sequence[int], first: int, alternatives: int) -> list[TokenLogprob]:
    """Return the expected log probabilities of ``tokens`` from number ``first`` (at least 1) on."""
    cell = 0
    reports: list[TokenLogprob] = []
    for position, token in enumerate(tokens):
        if position >= first:
            reports.append(report_of(cell, token, alternatives))
        cell = mix(cell, token, position)
    return reports


def reference(
    prompt: Sequence[int], count: int, seed: int, greedy: bool, stop_ids: frozenset[int], repeats: bool
) -> list[int]:
    """Return the expected tokens after ``prompt``: ``count`` of them, or up to the first stop id."""
    cell = 0
    for position, token in enumerate(prompt):
        cell = mix(cell, token, position)
    answer: list[int] = []
    position, token = len(prompt) - 1, prompt[-1]
    while len(answer) < count:
        token = token_after(cell, token, seed, position + 1, greedy, repeats)
        answer.append(token)
        if token in stop_ids:
            break
        position += 1
        cell = mix(cell, token, position)
    return answer


def layout_of(block_size: int) -> KVLayout:
    """Return the layout of a slot with ``block_size`` cells of CELL_BYTES."""
    return KVLayout("hash-1", 1, 1, 2, block_size, "float32")


def prepared_model(max_model_len: int) -> PreparedModel:
    """Return a prepared model without files."""
    return PreparedModel(
        folder=pathlib.Path("nowhere"),
        name=MODEL_NAME,
        fingerprint=FINGERPRINT,
        dtype="float32",
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(),
        bos_token_id=None,
    )


def loaded(max_model_len: int, backend: HashBackend) -> LoadedModel:
    """Return a loaded hash model, like a worker's backend factory."""
    return LoadedModel(prepared_model(max_model_len), backend)


class StepCosts:
    """Duration of steps: a fixed part, a part per token, and for each of the next steps an entry of ``stalls``.
    ``longest_s``: longest step so far."""

    def __init__(self, step_s: float, token_s: float) -> None:
        self.step_s = step_s
        self.token_s = token_s
        self.stalls: list[float] = []
        self.longest_s = step_s

    def of(self, batch: StepBatch) -> float:
        """Return the seconds of a step of this batch."""
        extra_s = self.stalls.pop() if self.stalls else 0.0
        took_s = self.step_s + self.token_s * batch.num_tokens + extra_s
        self.longest_s = max(self.longest_s, took_s)
        return took_s


class HashChunk(NamedTuple):
    """Tokens that a step computes of one sequence, from position ``first``; the context has ``length`` positions after
    the step."""

    table: list[int]
    tokens: list[int]
    first: int
    length: int


def _pieces_of(batch: StepBatch) -> Iterator[HashChunk]:
    starts, tokens, tables = batch.query_starts.tolist(), batch.token_ids.tolist(), batch.block_tables.tolist()
    for row, length in enumerate(batch.context_lens.tolist()):
        own = tokens[starts[row] : starts[row + 1]]
        yield HashChunk(tables[row], own, length - len(own), length)


class HashStep:
    """A step in flight. Reads and writes happen when it is awaited, as late as on a device."""

    def __init__(
        self, backend: HashBackend, batch: StepBatch, copies: Sequence[tuple[int, int]], rows: SamplingRows | None
    ) -> None:
        self.batch = batch
        self.copies = tuple(copies)
        self.rows = rows
        self.lands_s = 0.0
        self.scheduled = tuple(_pieces_of(batch))
        self.slots = self._slots(backend.layout.block_size)
        self._backend = backend

    def choose(self, rows: SamplingRows) -> None:
        self.rows = rows

    def wait(self) -> Sampled:
        return self._backend.finish(self)

    def _slots(self, size: int) -> tuple[set[int], set[int]]:
        """Return the slots that a step reads and writes."""
        reads, writes = {source for source, _ in self.copies}, {target for _, target in self.copies}
        for chunk in self.scheduled:
            last = -(-chunk.length // size)
            writes.update(chunk.table[chunk.first // size : last])
            reads.update(chunk.table[:last])
        return reads - writes, writes


class HashBackend:
    """The hash model as a worker's backend (:class:`pillion.engine.backends.backend.Backend`).

    ``watch`` is called when a step begins, and when it ends: (its tokens, slots that it reads, slots that it writes).
    ``found`` is called with each error in the cells.
    """

    def __init__(
        self,
        block_size: int,
        costs: StepCosts,
        *,
        runs_ahead: bool,
        repeats: bool,
        watch: Callable[[int, set[int], set[int]], None],
        found: Callable[[str], None],
    ) -> None:
        self.adapters = None
        self.layout = layout_of(block_size)
        self.vocab_size = VOCAB_SIZE
        self.max_steps_in_flight = 2 if runs_ahead else 1
        self._repeats = repeats
        self._costs = costs
        self._watch = watch
        self._found = found
        self._cells: Any = None
        self._bytes: Any = None
        # By slot, as of its last computation: the cell before its block, the block's bytes, and its last cell.
        self._computed: dict[int, tuple[int, bytes, int]] = {}
        self._last: tuple[int, ...] = ()
        self._free_s = 0.0
        self._under_way: list[HashStep] = []

    def bind_pool(self, memory: Any, num_slots: int) -> None:
        self._cells, self._bytes = memory.cast("q"), memory.cast("B")

    def bind_adapters(self, max_adapters: int, max_rank: int, targets: Sequence[str] = ()) -> None:
        raise ConfigError("--enable-lora: the hash model does not support adapters")

    def warm_up(self, max_tokens: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def launch(self, batch: StepBatch, copies: Sequence[tuple[int, int]], rows: SamplingRows | None) -> HashStep:
        step = HashStep(self, batch, copies, rows)
        self._watch(step.batch.num_tokens, *step.slots)
        began_s = max(time.monotonic(), self._free_s)
        self._free_s = step.lands_s = began_s + self._costs.of(batch)
        self._under_way.append(step)
        return step

    def slept(self, seconds: float) -> None:
        """Delay the steps in flight by ``seconds``, for which the process was paused."""
        for step in self._under_way:
            step.lands_s += seconds
        self._free_s += seconds
        self._costs.longest_s += seconds

    def finish(self, step: HashStep) -> Sampled:
        """Compute a step at its end, and pass its slots to ``watch`` again: they were in use until now."""
        self._under_way.remove(step)
        self._watch(step.batch.num_tokens, *step.slots)
        per_slot = self.layout.block_size * 2
        for source, target in step.copies:
            self._cells[target * per_slot : (target + 1) * per_slot] = self._cells[
                source * per_slot : (source + 1) * per_slot
            ]
        sampled = self._run(step)
        self._last = sampled.token_ids
        return sampled

    def _run(self, step: HashStep) -> Sampled:
        size, cells = self.layout.block_size, self._cells
        after: list[tuple[int, int]] = []
        for table, tokens, first, _ in step.scheduled:
            cell = self._read(table, first)
            for position, token in enumerate(tokens, first):
                if token < 0:
                    token = self._last[-1 - token]
                cell = mix(cell, token, position)
                place = (table[position // size] * size + position % size) * 2
                cells[place], cells[place + 1] = cell, token
                after.append((cell, token))
        rows = step.rows
        if rows is None:
            return Sampled()
        positions, seeds = rows.positions.tolist(), rows.seeds.tolist()
        greedy = [temperature < MIN_TEMPERATURE for temperature in rows["temperature"].tolist()]
        sampled = step.batch.sample_rows.tolist()
        # Sampled rows come first, then those to score.
        drawn = sampled[: len(positions)]
        chosen: list[int] = []
        reports: list[TokenLogprob | None] = []
        wanted = rows.logprobs.tolist()
        for row, seed, position, plain, alternatives in zip(drawn, seeds, positions, greedy, wanted, strict=True):
            cell, last = after[row]
            token = token_after(cell, last, seed, position, plain, self._repeats)
            chosen.append(token)
            reports.append(report_of(cell, token, alternatives) if alternatives >= 0 else None)
        return Sampled(tuple(chosen), tuple(reports) if any(reports) else (), self._scores(rows, sampled, after))

    def _scores(self, rows: SamplingRows, sampled: list[int], after: list[tuple[int, int]]) -> tuple[TokenLogprob, ...]:
        if rows.scored is None:
            return ()
        tokens, counts = rows.scored.token_ids.tolist(), rows.scored.alternatives.tolist()
        scored = zip(sampled[len(rows) :], tokens, counts, strict=True)
        return tuple(report_of(after[row][0], token, alternatives) for row, token, alternatives in scored)

    def _read(self, table: list[int], length: int) -> int:
        """Recompute and return the last cell of the first ``length`` positions."""
        size, block_bytes, cell = self.layout.block_size, self.layout.block_bytes, 0
        for number in range(length // size):
            slot = table[number]
            seen = self._bytes[slot * block_bytes : (slot + 1) * block_bytes]
            before = cell
            known = self._computed.get(slot)
            if known is not None and known[0] == before and seen == known[1]:
                cell = known[2]
                continue
            cell, good = self._compute(slot, before, number * size, size)
            if not good:
                return cell
            self._computed[slot] = before, bytes(seen), cell
        first = length // size * size
        return self._compute(table[first // size], cell, first, length - first)[0] if first < length else cell

    def _compute(self, slot: int, cell: int, first: int, count: int) -> tuple[int, bool]:
        """Return the last of ``count`` cells of a slot, whose first position is ``first``, and whether each is correct
        after ``cell``."""
        cells, place = self._cells, slot * self.layout.block_size * 2
        for position in range(first, first + count):
            cell = mix(cell, cells[place + 1], position)
            if cells[place] != cell:
                self._found(f"the KV of position {position} in slot {slot} is of another history")
                return cell, False
            place += 2
        return cell, True
