"""Drafters, their configuration and texts for tests."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from pillion.engine.drafts.draft_control import DraftControl
from pillion.engine.scheduling.block_chain import AdoptedTicket
from pillion.engine.scheduling.draft_tokens import Drafter, DraftTokens
from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.step_cost import StepCost
from pillion.engine.scheduling.step_plan import ScheduledChunk
from pillion.settings.speculative_config import SpeculativeConfig
from pillion.types import SamplingParams


def speculative(tokens: int, method: str = "ngram") -> SpeculativeConfig:
    """Return a configuration that drafts this number of tokens per step, or none if 0."""
    return SpeculativeConfig(method=method, num_speculative_tokens=tokens) if tokens else SpeculativeConfig()


def text_to_guess_for(
    tokens: Seq[int], block_size: int, max_model_len: int, sampling: SamplingParams | None = None
) -> Sequence:
    """Return a stream of these tokens with these sampling parameters, whose last token's KV has a slot and is not
    computed."""
    return Sequence(
        AdoptedTicket(1, (), (0,)),
        block_size,
        0.0,
        seq_id=1,
        token_ids=np.array(tokens, np.int32),
        parent_hash=bytes(32),
        prompt_tokens=len(tokens),
        sampling=replace(sampling or SamplingParams(temperature=0.0), max_tokens=100),
        max_model_len=max_model_len,
    )


def speculate(
    drafter: Drafter, control: DraftControl, cost: StepCost, decodes: Seq[ScheduledChunk], left: int
) -> list[ScheduledChunk]:
    """Return the decodes with draft tokens, at most ``left`` in total."""
    DraftTokens(control, drafter).draft(decodes, left, left, 0.0, cost=cost, grammars=None)
    return [chunk.lengthened() for chunk in decodes]
