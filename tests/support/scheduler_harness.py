"""A scheduler between a real slot ledger and the fake model, with each call to the node under the test's control."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import numpy.typing as npt

from pillion.engine.backends.batching import build_sampling, build_step_batch
from pillion.engine.drafts.draft_chains import DraftChains, DraftPasses, DraftShape
from pillion.engine.drafts.draft_control import DraftControl
from pillion.engine.drafts.worker_drafts import make_drafter
from pillion.engine.grammars.mask_threads import MaskJob
from pillion.engine.scheduling.adapter_slots import AdapterSlots
from pillion.engine.scheduling.block_chain import AdoptedTicket, ChunkDone
from pillion.engine.scheduling.block_manager import BlockManager
from pillion.engine.scheduling.draft_tokens import Drafter, DraftTokens
from pillion.engine.scheduling.grammars import Grammars
from pillion.engine.scheduling.partial_blocks import PartialBlocks
from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.scheduling.sequence import ParallelSampleSpec, Sequence, SequenceState
from pillion.engine.scheduling.states import States
from pillion.engine.scheduling.step_plan import (
    ChainOrder,
    CommitOrder,
    Outcome,
    ResumeOrder,
    StepPlan,
    Update,
)
from pillion.errors import NotFound, PillionError
from pillion.kernels.step import MASK_LATE, Sampled, StepBatch
from pillion.kvstore.hashing import chain_hashes, split_hashes
from pillion.kvstore.ledger.integrity import check_integrity
from pillion.kvstore.ledger.ledger import Ledger
from pillion.rules.priority import NO_FLOW, Flow
from pillion.settings.speculative_config import MAX_SPECULATIVE_TOKENS
from pillion.types import FinishReason, SamplingParams, TokenLogprob
from pillion.v1.kvnode_pb2 import CommitRun, CommitRunResult
from tests.support.fake_backend import VOCAB_SIZE, copy_blocks, greedy, kv_of, logits_of, run
from tests.support.fake_grammar import LateThreads, NumberGrammars, choices

BLOCK = 4
ROOT = b"\7" * 32
# Shift of every token per adapter number.
ADAPTER_SHIFT = 11
BAD_ADAPTER = "no such adapter"
# Flows of tenants by number; 0 is the anonymous flow.
FLOWS = (NO_FLOW, Flow(b"one"), Flow(b"three", 3.0), Flow(b"half", 0.5))
GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, seed=0)


@dataclass(frozen=True)
class NumberedAdapter:
    """A packed adapter that consists of its number."""

    number: int
    nbytes: int = 0


@dataclass
class SequenceRecord:
    """A test's record of one sequence."""

    prompt: list[int]
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    end: Update | None = None
    chunks: list[ChunkDone] = field(default_factory=list)
    cancelled: bool = False
    seed: int = 0
    stop: frozenset[int] = frozenset()
    penalized: bool = False
    grammar: int | None = None
    parent: int = 0
    scored: bool = False
    scores: list[TokenLogprob] = field(default_factory=list)
    adapter: int = 0


class SchedulerHarness:
    """One worker. ``step`` runs a step and checks its plan; ``answer`` delivers the oldest outcome to the node."""

    def __init__(
        self,
        *,
        slots: int = 64,
        budget: int = 16,
        max_num_seqs: int = 4,
        drafter: Drafter | None = None,
        max_whole_tokens: int = 0,
        punctual: float = 1.0,
        max_loras: int = 0,
        draft: Callable[[npt.NDArray[np.int64]], tuple[DraftShape, DraftPasses]] | None = None,
        partial_blocks: int | None = None,
        state_pages: int = 0,
        token_s: float = 0.0,
    ) -> None:
        """Create a worker. ``draft`` makes a draft model over the pool, int64 [slots, BLOCK], of blocks of the same
        size. ``partial_blocks``: max partial blocks kept, None disables them. A state takes ``state_pages`` slots, 0 is
        a model without states. A step takes ``token_s`` seconds per token; 0 leaves the length of prompts unknown."""
        self.pool = np.zeros((slots, BLOCK), dtype=np.int64)
        draft_model = None if draft is None else draft(self.pool)
        self._keeps_states = draft_model is not None and draft_model[0].reads_states
        self.control = DraftControl(MAX_SPECULATIVE_TOKENS)
        blocks = BlockManager(BLOCK)
        if draft_model is not None:
            drafter = make_drafter(*draft_model, blocks)
        self.draft_tokens = None if drafter is None else DraftTokens(self.control, drafter)
        self.scheduler = Scheduler(
            blocks=blocks,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            max_whole_tokens=max_whole_tokens,
            grammars=Grammars(blocks.free_slots),
            drafts=self.draft_tokens,
            partial_blocks=None if partial_blocks is None else PartialBlocks(partial_blocks, blocks.free_slots),
            states=States(state_pages, blocks) if state_pages else None,
            adapters=AdapterSlots(max_loras, blocks.in_flight),
        )
        self.loading: list[str] = []
        self.placed: dict[int, int] = {}
        self.broken_adapters: set[int] = set()
        self.evicted_adapters = 0
        self.max_loras = max_loras
        self.ledger = Ledger(itertools.count(1000).__next__, decode_reserve_percent=0)
        self.ledger.shape(slots)
        self.worker = self.ledger.attach("worker", "decode")
        self.gateway = self.ledger.attach("edge", "gateway")
        self.now = 0.0
        self._token_s = token_s
        self.masks = LateThreads(punctual, Random(slots + budget))
        self.grammars = NumberGrammars(self.masks)
        self.records: dict[int, SequenceRecord] = {}
        self.unsent: list[Outcome] = []
        self.resumes: list[ResumeOrder] = []
        self.draft_hits = 0
        self.preemptions = 0
        self.copies = 0
        self.swaps = 0
        self._ids = itertools.count(1)
        self._nonces = itertools.count(1)

    @property
    def draft_chains(self) -> DraftChains:
        """Chains of its draft model."""
        assert self.draft_tokens is not None
        assert self.draft_tokens.draft_chains is not None
        return self.draft_tokens.draft_chains

    @property
    def partial_blocks(self) -> PartialBlocks:
        """Partial blocks that it keeps."""
        assert self.scheduler.partial_blocks is not None
        return self.scheduler.partial_blocks

    def ends_at_a_place(self, sequence: Sequence) -> bool:
        """Return True if the next step of a prompt may end where its state is kept."""
        return any(place > sequence.next_start for place in sequence.step_ends)

    @property
    def adapters(self) -> AdapterSlots:
        """Slots of its adapters."""
        assert self.scheduler.adapters is not None
        return self.scheduler.adapters

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        stop: frozenset[int] = frozenset(),
        chunks: tuple[int, ...] = (),
        priority: int = 0,
        seed: int = 0,
        parallel_seeds: tuple[int, ...] = (),
        penalty: float = 0.0,
        grammar: int | None = None,
        scored: bool = False,
        adapter: int = 0,
        flow: int = 0,
    ) -> int | None:
        """Submit a stream, or a prefill range if it has chunk ends; return None if the node has no room for its prompt
        now. Parallel samples have the ids after the stream's. With a penalty each choice depends on the whole answer so
        far. A ``scored`` prompt uses no cached blocks."""
        last = 0 if scored else (len(prompt) if chunks else len(prompt) - 1) // BLOCK
        root = bytes([ROOT[0] + adapter]) * 32
        hashes = split_hashes(chain_hashes(root, prompt, BLOCK)[: last * 32])
        total = len(prompt) // BLOCK + 1 + self.scheduler.blocks.extra_blocks
        pages = self.scheduler.blocks.state_pages
        ticket = self.ledger.admit(self.gateway, next(self._nonces), hashes, total, pages)
        if ticket is None:
            return None
        adopted = self.ledger.adopt(self.worker, ticket.ticket_id, total - ticket.blocks - (1 if chunks else 0))
        self.ledger.release(self.gateway, [ticket.ticket_id])
        seq_id = next(self._ids)
        parallel_samples = tuple(ParallelSampleSpec(next(self._ids), parallel_seed) for parallel_seed in parallel_seeds)
        chain, leased, state = map(tuple, (adopted.chain_slots, adopted.leased_slots, adopted.state_slots))
        holding = AdoptedTicket(ticket.ticket_id, chain, leased, state, adopted.known_blocks)
        for name, own_seed in ((seq_id, seed), *((sample.seq_id, sample.seed) for sample in parallel_samples)):
            parent = 0 if name == seq_id else seq_id
            self.records[name] = SequenceRecord(
                prompt,
                max_tokens,
                seed=own_seed,
                stop=stop,
                penalized=penalty != 0,
                parent=parent,
                grammar=grammar,
                scored=scored and not parent,
                adapter=adapter,
            )
        sampling = replace(GREEDY, seed=seed, frequency_penalty=penalty, prompt_logprobs=0 if scored else None)
        sampling = replace(sampling, max_tokens=max_tokens, stop_token_ids=tuple(stop))
        sequence = Sequence(
            holding,
            BLOCK,
            self.now,
            seq_id=seq_id,
            token_ids=np.array(prompt, dtype=np.int32),
            parent_hash=root,
            adapter=str(adapter) if adapter else "",
            prompt_tokens=len(prompt),
            sampling=None if chunks else sampling,
            max_model_len=0 if chunks else 10_000,
            chunk_ends=chunks,
            priority=priority,
            parallel_samples=parallel_samples,
            flow=FLOWS[flow],
        )
        if grammar is not None:
            sequence.follow_grammar(self.grammars.start(grammar))
        self.scheduler.add(sequence, self.now)
        return seq_id

    def flood(self, flow: int, count: int, tokens: int = 60, priority: int = 0) -> list[int]:
        """Submit streams of one tenant; return the ids of those that the node has room for."""
        texts = [prompt(flow, 5 + number % 3) for number in range(count)]
        found = [self.submit(text, tokens, flow=flow, seed=n, priority=priority) for n, text in enumerate(texts)]
        return [seq_id for seq_id in found if seq_id is not None]

    def cancel(self, seq_id: int) -> None:
        """Cancel after a client's disconnect. Parallel samples that have not begun end with the first answer."""
        sequence = self.scheduler.sequences.get(seq_id)
        for name in (seq_id, *(sample.seq_id for sample in sequence.parallel_samples)) if sequence else (seq_id,):
            self.records[name].cancelled = True
        self.scheduler.cancel(seq_id, self.now)

    def step(self) -> StepPlan:
        """Run and check one step."""
        self.now += 0.01
        self.masks.catch_up()
        before = {id(s) for s in self.scheduler.queues.running if s.decoding}
        plan = self.scheduler.schedule(self.now)
        self._check_plan(plan, before)
        # As in the step loop: updates of events are flushed before the step runs.
        before_run = self.scheduler.flush(self.now)
        owned = {slot for s in self.scheduler.sequences.values() for slot in s.table().tolist()}
        owned |= {slot for chain in self.scheduler.side_chains() for slot in chain.owned_slots()}
        for source, target in plan.copies:
            assert {source, target} <= owned, "a copy of a slot that nobody has"
            assert not {source, target} & set(before_run.returned_slots), "a copy of a slot that was given back"
        if not before_run.empty:
            self.receive(before_run)
        sampled = self.run_plan(plan)
        self.now += self._token_s * sum(chunk.count for chunk in plan.scheduled)
        self.receive(self.scheduler.commit(plan, sampled, self.now))
        self.scheduler.check_integrity()
        return plan

    def run_plan(self, plan: StepPlan) -> Sampled:
        self.copies += len(plan.copies)
        if plan.copies:
            copy_blocks(self.pool, *zip(*plan.copies, strict=True))
        if not plan.scheduled:
            assert not plan.placements
            return Sampled()
        batch = build_step_batch(plan, BLOCK)
        self.place(plan, batch)
        sampled = chosen(run(self.pool, batch), choices_of(plan, self.placed), scored(plan))
        if not self._keeps_states:
            return sampled
        return replace(sampled, states=kv_of(batch.token_ids, batch.positions)[:, None])

    def place(self, plan: StepPlan, batch: StepBatch) -> None:
        """Load the plan's adapters into the backend; the batch then names those of its sequences."""
        for place, packed in plan.placements:
            assert isinstance(packed, NumberedAdapter)
            self.placed[place] = packed.number
        assert len(self.placed) <= self.max_loras
        wanted = [int(chunk.sequence.adapter or 0) for chunk in plan.scheduled]
        named = [-1] * len(wanted) if batch.adapters is None else batch.adapters.tolist()
        assert [self.placed[place] if place >= 0 else 0 for place in named] == wanted
        assert (batch.adapters is None) == (not any(wanted))

    def receive(self, outcome: Outcome) -> None:
        """Process the updates; those for the node wait for :meth:`answer`, those for the loader for :meth:`load`."""
        self.loading += outcome.adapter_orders
        self.evicted_adapters += outcome.evicted_adapters
        for update in outcome.updates:
            record = self.records[update.seq_id]
            assert not record.cancelled, "news of a cancelled sequence"
            assert record.end is None, "news after the end"
            assert not (update.prompt_logprobs and record.token_ids), "a score after a token"
            record.scores.extend(update.prompt_logprobs)
            record.token_ids.extend(update.token_ids)
            if update.ending is not None:
                record.end = update
                assert update.progress is not None
                self.preemptions += update.progress.preemptions
        for chunk in outcome.chunks:
            self.records[chunk.seq_id].chunks.append(chunk)
        self.unsent.append(outcome)

    def _check_plan(self, plan: StepPlan, decodes_before: set[int]) -> None:
        """Check I5: the budget is never exceeded and filled exactly, decodes go first, prompt tails in order."""
        scheduler, queues = self.scheduler, self.scheduler.queues
        budget = scheduler.budget.max_tokens
        assert plan.num_tokens <= budget
        planned = {id(chunk.sequence): chunk for chunk in plan.scheduled}
        assert len(planned) == len(plan.scheduled)
        # A decode may follow a first token that is yet to be chosen.
        ahead = {place for place, _ in plan.unknown}
        kinds = [chunk.sequence.decoding or place in ahead for place, chunk in enumerate(plan.scheduled)]
        assert kinds == sorted(kinds, reverse=True), "a prompt tail before a decode"
        for sequence in queues.running:
            judged = bool(sequence.num_in_flight and (sequence.next_is_last or sequence.num_proposed))
            waits = judged or self._held_up(sequence) or sequence in queues.yielding
            if id(sequence) in decodes_before and id(sequence) not in planned and not waits:
                assert sequence.next_start == sequence.num_blocks * BLOCK, "a decode with room was skipped"
                assert len(scheduler.free_slots) == 0, "a decode was skipped while there are slots"
        # A running sequence ran before or was next in the queue; the others follow.
        begun = [s for s in queues.running if not s.decoding and s.next_start < s.num_tokens]
        outside = [*queues.preempted, *queues.waiting] if queues.free_seqs else []
        cut = False
        for sequence in sorted(begun, key=lambda s: s.queue_order) + outside:
            if self._held_up(sequence) or sequence.awaits_adapter:
                continue
            chunk = planned.get(id(sequence))
            cut = cut or chunk is None or chunk.count < sequence.num_tokens - sequence.next_start
        if not scheduler.whole_prompts:
            assert not cut or plan.num_tokens == budget, "the step is not filled"
            short = [p for p, decodes in zip(plan.scheduled, kinds, strict=True) if not decodes]
            left = [p for p in short if p.count < p.sequence.num_tokens - p.start and not self._held_up(p.sequence)]
            assert len(left) <= 1, "two prompt tails were cut in one step"
            assert not left or left[0] is short[-1], "a prompt tail was served behind one that was cut"

    def _held_up(self, sequence: Sequence) -> bool:
        """Return True if a sequence may wait for its grammar, or for the tokens that its grammar will force."""
        grammar = sequence.grammar
        if grammar is None:
            return False
        known = bool(sequence.num_proposed) or not grammar.may_run_ahead
        return self.masks.punctual < 1 or (sequence.num_in_flight > 0 and known)

    def expect_adapter(self, number: int) -> None:
        """Announce a sequence with this adapter."""
        self.scheduler.expect_adapter(str(number), self.now)

    def load(self, count: int = 1) -> None:
        """Let the loader answer its first orders."""
        for _ in range(min(count, len(self.loading))):
            digest = self.loading.pop(0)
            if int(digest) in self.broken_adapters:
                self.scheduler.adapter_failed(digest, NotFound(BAD_ADAPTER), self.now)
            else:
                self.scheduler.adapter_loaded(digest, NumberedAdapter(int(digest)), self.now)
            self.scheduler.check_integrity()

    def answer(self) -> bool:
        """Deliver the oldest outcome to the node, in the order that Outcome defines. False: none is left."""
        self._resume()
        if not self.unsent:
            return False
        outcome, scheduler = self.unsent.pop(0), self.scheduler
        for order in outcome.commits:
            result = self.commit_order(order)
            scheduler.committed(order.seq_id, result.slots, result.refusal, self.now)
            if order.seq_id < 0:
                continue
            record = self.records[order.seq_id]
            if not result.refusal and not record.cancelled and record.end is None:
                record.chunks += order.chunks
        self.ledger.release(self.worker, outcome.releases)
        self.ledger.return_slots(self.worker, outcome.returned_slots)
        if outcome.lease_blocks:
            scheduler.granted(self.ledger.lease(self.worker, outcome.lease_blocks), self.now)
        self.resumes += outcome.resumes
        for draft in outcome.chain_orders:
            self._open_draft(draft)
        self.pool[self.ledger.free] = -1
        scheduler.check_integrity()
        check_integrity(self.ledger)
        return True

    def commit_order(self, order: CommitOrder) -> CommitRunResult:
        (result,) = self.ledger.commit(
            self.worker,
            [
                CommitRun(
                    ticket_id=order.ticket_id, slots=order.slots, block_hashes=order.block_hashes, after=order.after
                )
            ],
        )
        self.swaps += sum(own != slot for own, slot in zip(order.slots, result.slots, strict=False))
        return result

    def _open_draft(self, order: ChainOrder) -> None:
        hashes = split_hashes(order.block_hashes)
        ticket = self.ledger.pin_chain(self.worker, next(self._nonces), hashes)
        adopted = self.ledger.adopt(self.worker, ticket.ticket_id, 0)
        self.draft_hits += ticket.blocks
        self.scheduler.chain_opened(
            order.chain_id, AdoptedTicket(ticket.ticket_id, tuple(adopted.chain_slots), ()), self.now
        )

    def _resume(self) -> None:
        """Resume preempted streams in order, as memory allows."""
        while self.resumes:
            order = self.resumes[0]
            hashes = split_hashes(order.block_hashes)
            sequence = self.scheduler.sequences.get(order.seq_id)
            assert sequence is None or order.flow == sequence.flow
            if order.total_blocks > self.ledger.num_slots:
                self.scheduler.fail(order.seq_id, PillionError("never fits"), self.now)
            else:
                pages, nonce = order.state_pages, next(self._nonces)
                ticket = self.ledger.admit(self.worker, nonce, hashes, order.total_blocks, pages)
                if ticket is None:
                    self.scheduler.recall(order.total_blocks, self.now)
                    return
                adopted = self.ledger.adopt(self.worker, ticket.ticket_id, order.total_blocks - ticket.blocks)
                chain, leased, state = map(tuple, (adopted.chain_slots, adopted.leased_slots, adopted.state_slots))
                holding = AdoptedTicket(ticket.ticket_id, chain, leased, state, adopted.known_blocks)
                self.scheduler.resumed(order.seq_id, holding, self.now)
            self.resumes.pop(0)

    def finish(self, max_steps: int = 3000) -> None:
        """Run until nothing is left; no sequence may starve."""
        for _ in range(max_steps):
            if not self.busy():
                break
            self.load(2)
            self.step()
            while self.answer():
                pass
            self.receive_flush()
        assert not self.scheduler.sequences, "somebody starved"
        self.settle()

    def busy(self) -> bool:
        return bool(self.scheduler.sequences or self.unsent)

    def receive_flush(self) -> None:
        outcome = self.scheduler.flush(self.now)
        if not outcome.empty:
            self.receive(outcome)

    def run_all(self) -> int:
        """Run steps until no sequence is left, check the answers, and return the number of steps that computed
        something."""
        steps = 0
        while self.scheduler.sequences:
            steps += bool(self.answered_step().scheduled)
        self.settle()
        self.check_answers()
        return steps

    def answered_step(self) -> StepPlan:
        """Run a step, and let the node answer everything."""
        plan = self.step()
        while self.answer():
            pass
        self.receive_flush()
        return plan

    def settle(self) -> None:
        """Flush everything and reclaim all memory; then check that nothing is leased, pinned or promised."""
        self.scheduler.recall(self.ledger.num_slots, self.now)
        for _ in range(10):
            self.receive_flush()
            while self.answer():
                pass
        self.scheduler.check_integrity()
        check_integrity(self.ledger)
        books = self.ledger.status()
        assert (books.leased_blocks, books.pinned_blocks, books.tickets, books.reserved_blocks) == (0, 0, 0, 0), books

    def check_answers(self) -> None:
        """Check that every stream that was not cancelled has the model's answer, also with preemption, parallel samples
        and drafts (I6)."""
        for record in self.records.values():
            if record.cancelled or record.chunks:
                continue
            broken = record.adapter in self.broken_adapters
            if broken and record.parent and record.end is None:
                continue
            assert record.end is not None
            ending = record.end.ending
            assert ending is not None
            if broken and ending.error is not None:
                assert ending.error.message == BAD_ADAPTER
                assert not record.token_ids
                continue
            assert not broken or record.grammar is not None
            assert ending.error is None, ending.error
            self.check_answer(record)
            stopped = bool(record.stop) and record.token_ids[-1:] != [] and record.token_ids[-1] in record.stop
            if record.grammar is not None:
                stopped = stopped or not choices(record.grammar, record.token_ids)
            assert ending.reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert stopped or len(record.token_ids) == record.max_tokens

    def check_answer(self, record: SequenceRecord) -> None:
        """Check that the tokens so far are the model's, with none after a stop id."""
        count = len(record.token_ids)
        shift = record.seed + ADAPTER_SHIFT * record.adapter
        assert record.token_ids == answer(record.prompt, shift, count, record.penalized, record.grammar)
        prompt, known = record.prompt, len(record.scores)
        whole = not record.cancelled and record.end is not None and record.end.ending.error is None
        assert known == (len(prompt) - 1 if record.scored and whole else known)
        assert record.scored or not known
        assert record.scores == [
            score_of(prompt[end], logits_of(kv_of(prompt[:end], np.arange(end)))) for end in range(1, known + 1)
        ]
        assert len(record.token_ids) <= record.max_tokens
        assert not record.stop.intersection(record.token_ids[:-1])


def prompt(seed: int, length: int) -> list[int]:
    """Return ``length`` ids; prompts of one seed are prefixes of each other."""
    return [(seed * 31 + position * 17 + seed * position) % 97 for position in range(length)]


def answer(prompt: list[int], seed: int, count: int, penalized: bool = False, grammar: int | None = None) -> list[int]:
    """Return the expected answer: ``greedy``, each token shifted by the seed, and with a penalty by all tokens of the
    answer; with a grammar the shifted token indexes the allowed ones."""
    tokens = list(prompt)
    for _ in range(count):
        history = sum(tokens[len(prompt) :]) if penalized else 0
        token = (greedy(tokens, 1)[0] + seed + history) % VOCAB_SIZE
        allowed = choices(grammar, tokens[len(prompt) :]) if grammar is not None else range(VOCAB_SIZE)
        if not allowed:
            break
        tokens.append(allowed[token % len(allowed)])
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class RowChoice:
    """The mapping of a row's greedy choice to its token: shifted, and by the masks of a grammar, which may be late."""

    shift: int
    masks: MaskJob | None = None
    place: int = 0

    def of(self, token: int) -> int:
        token = (token + self.shift) % VOCAB_SIZE
        if self.masks is None:
            return token
        if not self.masks.wait(0):
            return MASK_LATE
        bits = np.unpackbits(self.masks.bits[self.place].view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        return int(allowed[token % len(allowed)]) if allowed else 0


def choices_of(plan: StepPlan, placed: Mapping[int, int]) -> list[RowChoice]:
    """Return each row's choice as determined when the choices are begun; ``placed`` are the adapters in the slots."""
    found: list[RowChoice] = []
    for chunk in plan.scheduled:
        sequence, end = chunk.sequence, chunk.start + chunk.count
        if not chunk.samples:
            continue
        assert sequence.sampling is not None
        # By row: the answer before the token that it chooses, drafts included.
        histories = [0] * (chunk.samples + len(chunk.parallel_seeds))
        if sequence.sampling.frequency_penalty:
            known = end <= sequence.num_tokens + sequence.num_proposed
            # The previous token was not chosen, since its mask was late: this choice is void.
            void = sequence.end_reported or (sequence.grammar is not None and not sequence.num_in_flight)
            assert known or void, "a choice that reads a token which nobody knows yet"
            ends = [*range(end - chunk.samples + 1, end), *[end] * (1 + len(chunk.parallel_seeds))]
            histories = [int(sequence.tokens(sequence.prompt_tokens, place).sum()) for place in ends]
        seeds = (*[int(sequence.sampling.seed or 0)] * chunk.samples, *chunk.parallel_seeds)
        masks = None
        grammar = sequence.grammar
        if grammar is not None:
            masks = grammar.place_masks(sequence.proposed().tolist(), chunk.samples)
        last = chunk.samples - 1
        shift = ADAPTER_SHIFT * placed.get(sequence.adapter_slot, 0)
        found += [
            RowChoice(seed + history + shift, masks, min(place, last))
            for place, (seed, history) in enumerate(zip(seeds, histories, strict=True))
        ]
    return found


def scored(plan: StepPlan) -> list[int]:
    """Return the tokens that the last rows of the plan's batch score."""
    rows = (
        build_sampling(replace(plan, unknown=()), None).scored
        if any(chunk.scores for chunk in plan.scheduled)
        else None
    )
    return [] if rows is None else rows.token_ids.tolist()


def score_of(token: int, row: npt.NDArray[np.float32]) -> TokenLogprob:
    """Return the token's own logit as its log probability."""
    return TokenLogprob(token, float(row[token]))


def chosen(logits: npt.NDArray[np.float32], rows: Seq[RowChoice], scored: Seq[int] = ()) -> Sampled:
    """Return the greedy choice shifted by the seed, so that parallel answers differ and every token depends on its
    seed."""
    assert len(logits) == len(rows) + len(scored)
    likeliest = logits[: len(rows)].argmax(axis=1).tolist()
    return Sampled(
        tuple(row.of(token) for row, token in zip(rows, likeliest, strict=True)),
        scored=tuple(score_of(token, row) for token, row in zip(scored, logits[len(rows) :], strict=True)),
    )


def states(harness: SchedulerHarness) -> Seq[SequenceState]:
    """Return the state of every sequence, oldest first."""
    return [s.state for _, s in sorted(harness.scheduler.sequences.items())]
