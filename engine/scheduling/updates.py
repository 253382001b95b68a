"""What a scheduler has to say of a sequence, as updates in the outcome being gathered."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from pillion.engine.scheduling.sequence import Ending, Sequence, SequenceProgress
from pillion.engine.scheduling.step_plan import Outcome, Update
from pillion.types import FinishReason, TokenLogprob


def tell_tokens(
    out: Outcome,
    sequence: Sequence,
    chosen: Seq[tuple[int, TokenLogprob | None]],
    reason: FinishReason | None,
    now: float,
    progress: SequenceProgress | None = None,
) -> None:
    """New tokens; with a ``reason`` they are the last ones."""
    ids = tuple(token for token, _ in chosen)
    said = tuple(logprob for _, logprob in chosen if logprob is not None)
    if reason is None:
        out.updates.append(Update(seq_id=sequence.seq_id, token_ids=ids, logprobs=said, progress=progress))
    else:
        tell_end(out, sequence, Ending(reason=reason), now, ids, said)


def tell_end(
    out: Outcome,
    sequence: Sequence,
    ending: Ending,
    now: float,
    token_ids: tuple[int, ...] = (),
    logprobs: tuple[TokenLogprob, ...] = (),
) -> None:
    """How it ended, and the tokens that came with that. Nothing is said of it afterwards."""
    sequence.told = True
    sequence.progress.ended_s = now
    out.updates.append(
        Update(
            seq_id=sequence.seq_id, token_ids=token_ids, logprobs=logprobs, ending=ending, progress=sequence.progress
        )
    )
