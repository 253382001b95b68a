"""Adds speculative decoding to a worker's steps: the room's features of a worker and of its scheduler.

Sampling is a pure function of (logits, seed, position) (I6), so a guess is right exactly when it is the token that
would have been chosen there anyway: drafts change how many steps an answer takes, never its tokens, at any temperature.
Guesses are cut if another feature refuses them, and are made only after decodes for which no other feature proposes
tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from functools import partial

from pillion.config import DecodeFlags
from pillion.engine.backends.cpu.cpu_loading import thread_count
from pillion.engine.drafts.draft_chains import DraftChains, DraftPasses, DraftShape
from pillion.engine.drafts.draft_control import DraftControl
from pillion.engine.drafts.draft_loading import load_draft
from pillion.engine.drafts.draft_model import DraftModel
from pillion.engine.drafts.drafter import Drafter
from pillion.engine.drafts.eagle_chains import EagleChains
from pillion.engine.drafts.lookup_drafters import make_lookup_drafter
from pillion.engine.drafts.state_drafts import StateDraftChains
from pillion.engine.sampling.sampling_rows import Sampled
from pillion.engine.scheduling.block_chain import BlockChain, Holding
from pillion.engine.scheduling.block_manager import BlockManager
from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.step_feature import StepFeature, Steps
from pillion.engine.scheduling.step_plan import SequencePiece, StepPlan
from pillion.engine.worker.worker_feature import WorkerFeature, WorkerSetup
from pillion.kvstore.client.attachment import Attachment
from pillion.speculative_config import SpeculativeConfig


class Guesses(StepFeature):
    """Makes the guesses of one scheduler.

    Args:
        control: decides how many tokens are guessed for each stream.
        make_drafter: makes the drafter that guesses them, over the scheduler's blocks.
    """

    def __init__(self, control: DraftControl, make_drafter: Callable[[BlockManager], Drafter]) -> None:
        self._control = control
        self._make_drafter = make_drafter
        # This is the drafter if it is a model with KV of its own, else None.
        self.draft_chains: DraftChains | None = None

    def bind(self, steps: Steps) -> None:
        self._steps = steps
        self._drafter = self._make_drafter(steps.blocks)
        if isinstance(self._drafter, DraftChains):
            self.draft_chains = self._drafter

    def joined(self, sequence: Sequence, now: float) -> None:
        if not sequence.is_prefill:
            self._control.begin(sequence)

    def left(self, sequence: Sequence) -> None:
        if not sequence.is_prefill:
            self._drafter.ended(sequence)

    def may_run_ahead(self) -> bool:
        """Returns whether the next step may be planned where nothing would be guessed. A guess can only follow tokens
        that are known."""
        if self._control.keeps_resting:
            return True
        chains = self.draft_chains
        streams = (s for s in self._steps.queues.running if s.decoding and not s.is_prefill)
        known = [s for s in streams if s.guesses.found or (chains is not None and chains.catches_up(s))]
        return not self._control.may_guess(known)

    def propose(self, pieces: Seq[SequencePiece], spare: int, idle: int, now: float) -> tuple[int, float]:
        chains, control, drafter = self.draft_chains, self._control, self._drafter
        if chains is not None:
            chains.begin_step(idle, now)
        if control.rests(len(pieces)):
            return 0, 0.0
        streams, rooms = [], []
        for piece in pieces:
            if not piece.sequence.num_proposed:
                streams.append(piece.sequence)
                rooms.append(min(spare, _room(piece)))
        if not streams:
            return 0, 0.0
        control.observe(pieces, self._steps.budget.cost, drafter.seconds_per_token(len(streams)) / len(streams))
        self._guess(streams, control.decide(streams, rooms, spare))
        took_s = chains.took_s if chains is not None else 0.0
        control.drafted(took_s)
        return sum(stream.num_proposed for stream in streams), took_s

    def _guess(self, streams: Seq[Sequence], shares: Seq[int]) -> None:
        """Guesses so many tokens for each of the streams; streams without a guess are probed, in their turn."""
        control, drafter, fitting = self._control, self._drafter, self._steps.fitting
        wanted = [(stream, most) for stream, most in zip(streams, shares, strict=True) if most]
        silent = (stream for stream, most in zip(streams, shares, strict=True) if not most)
        due = control.due_for_probe(silent, slow=drafter.seconds_per_token(1) > 0)
        if not (wanted or due):
            return
        control.drafts_for(len(wanted), len(due))
        guesses = drafter.draft([*wanted, *due])
        found = [
            (stream, fitting(stream, guess[:most])) for (stream, most), guess in zip(wanted, guesses, strict=False)
        ]
        if wanted and control.pays([(stream, len(tokens)) for stream, tokens in found]):
            for stream, tokens in found:
                stream.guesses.asked(tokens, stream.num_tokens)
                if len(tokens):
                    stream.propose(tokens)
        else:
            for stream, tokens in found:
                control.keep_as_probe(stream, tokens)
        for (stream, _), guess in zip(due, guesses[len(wanted) :], strict=True):
            stream.guesses.probe(guess, stream.num_tokens)

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        self._control.stepped(plan, seconds)

    def judged(self, sequence: Sequence, proposed: int, right: int) -> None:
        self._control.judged(sequence, proposed, right)

    def landed(self, plan: StepPlan, sampled: Sampled) -> None:
        if self.draft_chains is not None and sampled.states is not None:
            self.draft_chains.landed(plan.pieces, sampled.states)

    def lacking_blocks(self) -> int:
        return self.draft_chains.lacking_blocks if self.draft_chains is not None else 0

    def yield_slots(self, blocks: int, now: float) -> bool:
        return self.draft_chains is not None and self.draft_chains.yield_slots(blocks, now)

    def owns_chain(self, chain_id: int) -> bool:
        return self.draft_chains is not None and chain_id in self.draft_chains.chains

    def chain_opened(self, chain_id: int, holding: Holding | None, now: float) -> None:
        assert self.draft_chains is not None
        self.draft_chains.opened(chain_id, holding, now)

    def chain_committed(self, chain_id: int, slots: Seq[int], refusal: str) -> None:
        assert self.draft_chains is not None
        self.draft_chains.committed(chain_id, slots, refusal)

    def chains(self) -> Iterable[BlockChain]:
        return self.draft_chains.chains.values() if self.draft_chains is not None else ()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        if self.draft_chains is not None:
            self.draft_chains.check_integrity(sequences)


def _room(piece: SequencePiece) -> int:
    """Returns how many tokens may be guessed after a piece: none after a token that nobody knows yet, and after the
    first token of siblings."""
    sequence = piece.sequence
    return 0 if sequence.num_in_flight or piece.sibling_seeds else sequence.room_for_proposals


def with_drafter(drafter: Drafter, control: DraftControl) -> Guesses:
    """Makes the feature for a drafter that has no KV."""
    return Guesses(control, lambda blocks: drafter)


def with_draft_model(shape: DraftShape, passes: DraftPasses, control: DraftControl) -> Guesses:
    """Makes the feature for a draft model of this shape, whose passes ``passes`` runs."""
    kind = EagleChains if shape.reads_states else StateDraftChains if shape.state_pages else DraftChains
    return Guesses(control, partial(kind, shape, passes))


class DraftRoom(WorkerFeature):
    """Holds what a worker guesses tokens with: a method without a model, or a model over the worker's pool."""

    def __init__(self, config: SpeculativeConfig, draft: tuple[DraftShape, DraftModel] | None) -> None:
        self._draft = draft
        # The control is kept here, because what it has measured stays true when the worker begins a new epoch.
        self._control = DraftControl.of(config)
        self._drafter = make_lookup_drafter(config) if draft is None else None

    def step_feature(self) -> StepFeature:
        if self._drafter is not None:
            return with_drafter(self._drafter, self._control)
        assert self._draft is not None
        return with_draft_model(*self._draft, self._control)

    def bind_pool(self, attachment: Attachment) -> None:
        if self._draft is not None:
            self._draft[1].bind_pool(attachment.pool, attachment.num_slots)

    def warm_up(self, max_tokens: int) -> None:
        if self._draft is not None:
            self._draft[1].backend.warm_up(max_tokens)

    def close(self) -> None:
        if self._draft is not None:
            self._draft[1].backend.close()


async def load_drafts(setup: WorkerSetup) -> WorkerFeature | None:
    """Loads the drafter that ``--speculative-config`` asks for; returns None where it asks for none. Raises
    ConfigError."""
    flags = setup.flags
    config = flags.speculative_config if isinstance(flags, DecodeFlags) else SpeculativeConfig()
    if not config.method:
        return None
    if not config.model:
        return DraftRoom(config, None)
    if config.method == "eagle3":
        # The memory of a head's weights is not shared, so a standby loads them only when its turn comes.
        await asyncio.to_thread(setup.turn.wait)
    load = partial(load_draft, most_tokens=setup.max_num_batched_tokens, load=setup.load)
    return DraftRoom(config, await asyncio.to_thread(load, flags, config, setup.model, thread_count(flags)))
