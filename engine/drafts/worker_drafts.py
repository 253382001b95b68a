"""Holds what a worker drafts tokens with, and makes what its schedulers ask for draft tokens (speculative decoding)."""

from __future__ import annotations

from collections.abc import Callable

from pillion.config import DecodeFlags, WorkerFlags
from pillion.engine.backends.cpu.cpu_loading import thread_count
from pillion.engine.backends.loaded_model import BackendFactory, LoadedModel
from pillion.engine.drafts.draft_chains import DraftChains, DraftPasses, DraftShape
from pillion.engine.drafts.draft_control import DraftControl
from pillion.engine.drafts.draft_loading import load_draft
from pillion.engine.drafts.draft_model import DraftModel
from pillion.engine.drafts.eagle_chains import EagleChains
from pillion.engine.drafts.lookup_drafters import make_lookup_drafter
from pillion.engine.scheduling.block_manager import BlockManager
from pillion.engine.scheduling.draft_tokens import Drafter, DraftTokens
from pillion.kvstore.client.attachment import Attachment
from pillion.settings.speculative_config import SpeculativeConfig


def chains_of(shape: DraftShape, passes: DraftPasses, blocks: BlockManager) -> DraftChains:
    """Makes the drafter of one scheduler that has a draft model of this shape, whose passes ``passes`` runs."""
    kind = EagleChains if shape.reads_states else DraftChains
    return kind(shape, passes, blocks)


class WorkerDrafts:
    """Holds what a worker drafts tokens with, through all its epochs: a method without a model, or a model over the
    worker's pool."""

    def __init__(self, config: SpeculativeConfig, draft: tuple[DraftShape, DraftModel] | None) -> None:
        self._draft = draft
        # The control is kept here, because what it has measured stays true when the worker begins a new epoch.
        self._control = DraftControl.of(config)
        self._drafter = make_lookup_drafter(config) if draft is None else None

    def draft_tokens(self, blocks: BlockManager) -> DraftTokens:
        """Makes what the scheduler of one epoch asks for draft tokens, over its blocks."""
        drafter: Drafter | None = self._drafter
        if drafter is None:
            assert self._draft is not None
            drafter = chains_of(*self._draft, blocks)
        return DraftTokens(self._control, drafter)

    def bind_pool(self, attachment: Attachment) -> None:
        """Notes that the worker's pool is mapped. Raises ConfigError for a pool that the draft model cannot use."""
        if self._draft is not None:
            self._draft[1].bind_pool(attachment.pool, attachment.num_slots)

    def warm_up(self, max_tokens: int) -> None:
        """Pays one-time costs of passes of up to so many tokens."""
        if self._draft is not None:
            self._draft[1].backend.warm_up(max_tokens)

    def close(self) -> None:
        """Ends the draft model's threads. Idempotent."""
        if self._draft is not None:
            self._draft[1].backend.close()


def load_drafts(
    flags: WorkerFlags, model: LoadedModel, most_tokens: int, load: BackendFactory, wait_turn: Callable[[], object]
) -> WorkerDrafts | None:
    """Loads the drafter that ``--speculative-config`` asks for; returns None where it asks for none. Its passes have at
    most ``most_tokens`` tokens. ``wait_turn`` blocks until this process may take memory of its own. Raises ConfigError.
    """
    config = flags.speculative_config if isinstance(flags, DecodeFlags) else SpeculativeConfig()
    if not config.method:
        return None
    if not config.model:
        return WorkerDrafts(config, None)
    if config.method == "eagle3":
        # The memory of a head's weights is not shared, so a standby loads them only when its turn comes.
        wait_turn()
    return WorkerDrafts(config, load_draft(flags, config, model, thread_count(flags), most_tokens, load))
