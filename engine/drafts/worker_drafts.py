"""A worker's drafter for speculative decoding, from which each scheduler gets its DraftTokens."""

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


def make_drafter(shape: DraftShape, passes: DraftPasses, blocks: BlockManager) -> DraftChains:
    """Return the drafter of one scheduler with a draft model of ``shape``, run by ``passes``."""
    kind = EagleChains if shape.reads_states else DraftChains
    return kind(shape, passes, blocks)


class WorkerDrafts:
    """A worker's drafter for all of its epochs: a look-up method, or a model over the worker's pool (``draft``)."""

    def __init__(self, config: SpeculativeConfig, draft: tuple[DraftShape, DraftModel] | None) -> None:
        self._draft = draft
        # Shared by all epochs, because its measurements stay valid.
        self._control = DraftControl.of(config)
        self._drafter = make_lookup_drafter(config) if draft is None else None

    def draft_tokens(self, blocks: BlockManager) -> DraftTokens:
        """Return the draft tokens of one epoch's scheduler, whose slots ``blocks`` manages."""
        drafter: Drafter | None = self._drafter
        if drafter is None:
            assert self._draft is not None
            drafter = make_drafter(*self._draft, blocks)
        return DraftTokens(self._control, drafter)

    def bind_pool(self, attachment: Attachment) -> None:
        """Use the worker's mapped pool. Raises ConfigError for a pool that the draft model cannot use."""
        if self._draft is not None:
            self._draft[1].bind_pool(attachment.pool, attachment.num_slots)

    def warm_up(self, max_tokens: int) -> None:
        """Warm up the draft model's passes of up to ``max_tokens`` tokens."""
        if self._draft is not None:
            self._draft[1].backend.warm_up(max_tokens)

    def close(self) -> None:
        """Stop the draft model's threads. Idempotent."""
        if self._draft is not None:
            self._draft[1].backend.close()


def load_drafts(
    flags: WorkerFlags, model: LoadedModel, max_tokens: int, load: BackendFactory, wait_turn: Callable[[], object]
) -> WorkerDrafts | None:
    """Load the drafter of ``--speculative-config``; None without one. A draft model's passes have up to ``max_tokens``
    tokens. ``wait_turn`` blocks until this process may allocate private memory. Raises ConfigError if the model cannot
    be loaded or cannot draft for ``model``."""
    config = flags.speculative_config if isinstance(flags, DecodeFlags) else SpeculativeConfig()
    if not config.method:
        return None
    if not config.model:
        return WorkerDrafts(config, None)
    if config.method == "eagle3":
        # A head's weights are not shared, so a standby loads them only at its turn.
        wait_turn()
    return WorkerDrafts(config, load_draft(flags, config, model, thread_count(flags), max_tokens, load))
