"""Choice of tokens: a pure function of (logits, history, seed, position) (I6).

A row of logits passes these stages, in the order of Hugging Face's processors:

    the mask of allowed tokens, on logits or on candidates                                        masks.py
    bias, repetition penalty, presence and frequency penalty, stop ids banned before min_tokens   here
    temperature, top_k, top_p, min_p: scores, and the smallest logit that may be drawn            cuts.py
    the token with the largest score + noise                                                      gumbel.py

Bias is added; the repetition penalty divides positive logits and multiplies others (CTRL, Keskar et al., 2019);
presence and frequency penalties are subtracted, as OpenAI defines them; banned tokens get -inf. Repetition counts
tokens of prompt and answer, the other two only those of the answer.

Temperature 0 takes the largest logit, of equals the lowest id. Other rows are drawn all at once. The result is that of
noise for every token, but a group of 128 tokens is examined only if its largest logit could win with its largest noise,
and so is each token in it. Sums are formed only within a row, so a row's result does not depend on the batch.

A row whose largest logit is NaN or infinite yields NO_TOKEN, and only its request fails. Nothing raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from typing import NamedTuple

import numpy as np
import torch

from pillion.engine.sampling.cuts import (
    cuts,
    gather_groups,
    group_maxima,
    in_nucleus,
    lone_nuclei,
    row_cut,
    surely_in_nucleus,
    whole_groups,
)
from pillion.engine.sampling.gumbel import GROUP_TOKENS, group_waits, token_waits
from pillion.engine.sampling.logprobs import LogprobReport
from pillion.engine.sampling.masks import AllowedTokens, mask_rows
from pillion.engine.sampling.scores import score_on_host
from pillion.kernels.step import (
    MASK_LATE,
    MIN_TEMPERATURE,
    NO_IDS,
    NO_TOKEN,
    Float32,
    Ids,
    Int64,
    RowEdit,
    Sampled,
    SamplingRows,
)

# Tolerance of bounds of scores: far above rounding errors.
_SLACK = np.float32(1e-3)


class LargestLogits(NamedTuple):
    """The largest logits of rows, found by a backend while it computed.

    Attributes:
        maxima: float32 [R, V / GROUP_TOKENS], the group maxima (:func:`pillion.engine.sampling.cuts.group_maxima`).
        tokens: int32 [R], the token with each row's largest logit, of equals the lowest id; -1 if the row has a logit
            that is not finite.
    """

    maxima: Float32
    tokens: Ids


def sample(logits: torch.Tensor, rows: SamplingRows, largest: LargestLogits | None = None) -> Sampled:
    """Sample a token for each of the first R rows of logits [R + Q, V] float32, with log probabilities for rows that
    report them, and score the prompt tokens of the last Q rows. ``largest``: of at least the first R rows; None if
    unknown.

    Edits the logits temporarily, so they must not be read meanwhile. In rows with a mask, logits and the maxima in
    ``largest`` may be -inf afterwards.
    """
    if rows.scored is not None:
        chosen = sample(logits[: len(rows)], replace(rows, scored=None), largest)
        return replace(chosen, scored=score_on_host(logits[len(rows) :], rows.scored))
    if not len(rows):
        return Sampled()
    late, edits, allowed = NO_IDS, rows.edits, None
    if rows.masks is not None:
        bits, ready = rows.masks.take()
        late, masked, bits = rows.masks.rows[~ready], rows.masks.rows[ready], bits[ready]
        allowed = AllowedTokens.of(masked, bits, rows)
        if allowed is None:
            edits, largest = mask_rows(logits.numpy(), masked, bits, edits), None
    if edits:
        largest = None
    if rows.plain and rows.masks is None:
        greedy = largest.tokens[: len(rows)].tolist() if largest is not None else _largest(logits)
        if greedy is not None and min(greedy) >= 0:
            return Sampled(tuple(greedy))
    table = whole_groups(logits)
    with np.errstate(all="ignore"):
        report = LogprobReport(table, logits.shape[1], rows.logprobs) if (rows.logprobs >= 0).any() else None
        with edited(table, edits):
            tokens = _choose(table, rows, largest, allowed)
        tokens[late] = MASK_LATE
        return Sampled(tuple(tokens.tolist()), report.of(tokens) if report is not None else ())


def _largest(logits: torch.Tensor) -> list[int] | None:
    """Return the token with each row's largest logit, of equals the lowest id; None if one is NaN or infinite."""
    table: Float32 = logits.numpy()
    tokens: list[int] = table.argmax(axis=1).tolist()
    value = table.item
    return tokens if all(isfinite(value(row, token)) for row, token in enumerate(tokens)) else None


@contextmanager
def edited(table: Float32, edits: Sequence[RowEdit]) -> Iterator[None]:
    """Edit the logits ``table`` [R, V] for the duration of the block, then restore them bit by bit."""
    touched = []
    for edit in edits:
        ids = np.concatenate((edit.biased, edit.seen, edit.answered, _within(edit.banned, table.shape[1])))
        # An id may occur several times: read all values before any is written.
        touched.append((edit.row, ids, table[edit.row, ids]))
    try:
        for edit in edits:
            _apply(table[edit.row], edit)
        yield
    finally:
        for row, ids, before in touched:
            table[row, ids] = before


def _apply(row: Float32, edit: RowEdit) -> None:
    """Edit a row of logits [V] in place."""
    row[edit.biased] += edit.bias
    if len(edit.seen):
        values, penalty = row[edit.seen], np.float32(edit.repetition)
        row[edit.seen] = np.where(values > 0, values / penalty, values * penalty)
    if len(edit.answered):
        ids, counts = np.unique(edit.answered, return_counts=True)
        row[ids] -= np.float32(edit.frequency) * counts.astype(np.float32) + np.float32(edit.presence)
    row[_within(edit.banned, len(row))] = -np.inf


def _within(ids: Int64, width: int) -> Int64:
    """Drop ids without a logit: a tokenizer may have end tokens beyond the model's vocabulary."""
    return ids[ids < width]


def _choose(table: Float32, rows: SamplingRows, largest: LargestLogits | None, allowed: AllowedTokens | None) -> Int64:
    """Choose a token per row of edited logits [R, W]; NO_TOKEN for rows whose largest logit is not finite."""
    each = np.arange(len(table))
    drawn = rows["temperature"] >= MIN_TEMPERATURE
    if allowed is None and not drawn.any():
        tokens: Int64 = table.argmax(axis=1)
        broken = ~np.isfinite(table[each, tokens])
    else:
        # The largest logit is the token of a greedy row, and bounds the totals of a drawn one.
        if largest is not None and largest.tokens[: len(rows)].min() >= 0:
            maxima, tokens = largest.maxima[: len(rows)], largest.tokens[: len(rows)].astype(np.int64)
            broken = np.zeros(len(rows), dtype=bool)
        else:
            maxima = group_maxima(table)
            group = maxima.argmax(axis=1)
            tokens = group * GROUP_TOKENS + gather_groups(table, each, group).argmax(axis=1)
            broken = ~np.isfinite(table[each, tokens])
        if allowed is not None:
            allowed.settle(table, maxima, tokens, broken)
        racing = np.flatnonzero(drawn & ~broken)
        if len(racing):
            tokens[racing] = _race_in_nuclei(table, maxima[racing], rows, racing, tokens[racing], allowed)
    tokens[broken] = NO_TOKEN
    return tokens


def _race_in_nuclei(
    table: Float32,
    maxima: Float32,
    rows: SamplingRows,
    racing: Int64,
    likeliest: Int64,
    allowed: AllowedTokens | None,
) -> Int64:
    """Draw a token [S] of each of the rows ``racing``. ``maxima``: of their groups [S, G]; ``likeliest``: tokens [S].

    A lone nucleus (:mod:`pillion.engine.sampling.cuts`) is expensive to find, so it is ignored at first. Mostly the
    winner is inside the nucleus, and so also wins there; the other rows are drawn again.
    """
    cut = cuts(table, maxima, rows, racing, lone=False)
    winners = _race(table, maxima, rows, racing, likeliest, cut, allowed)
    outside = []
    lone = lone_nuclei(rows, racing, table.shape[1])
    if len(lone):
        lone = lone[~surely_in_nucleus(table, maxima[lone], rows, racing[lone], winners[lone])]
    for index in lone.tolist():
        row, top = table[racing[index]], maxima[index].max()
        temperature, top_p = rows["temperature"][racing[index]], float(rows["top_p"][racing[index]])
        if not in_nucleus(row, top, temperature, top_p, int(winners[index])):
            cut[index] = max(cut[index], row_cut(row, top, temperature, 0, top_p))
            outside.append(index)
    if outside:
        winners[outside] = _race(table, maxima[outside], rows, racing[outside], likeliest[outside], cut[outside])
    return winners


def _race(
    table: Float32,
    maxima: Float32,
    rows: SamplingRows,
    racing: Int64,
    likeliest: Int64,
    cut: Float32,
    allowed: AllowedTokens | None = None,
) -> Int64:
    """Draw a token [S] of each of the rows ``racing``, among allowed tokens whose logits are at least ``cut`` [S]."""
    num_groups = maxima.shape[1]
    top, temperature = table[racing, likeliest][:, None], rows["temperature"][racing][:, None]
    cut = cut[:, None]
    seeds, positions = rows.seeds[racing], rows.positions[racing]
    waits, firsts, wait = group_waits(seeds, positions, num_groups, likeliest)
    max_noise = -np.log(waits)

    # Lower bound of each row's winning total: the largest total among each group's first token and the likeliest token.
    tokens = np.arange(num_groups) * GROUP_TOKENS + firsts
    values = table.reshape(-1).take((racing * table.shape[1])[:, None] + tokens)
    totals = np.where(values >= cut, (values - top) / temperature + max_noise, np.float32(-np.inf))
    if allowed is not None:
        allowed.pass_over(totals, racing, tokens)
    min_winning = np.maximum(totals.max(axis=1), -np.log(wait))[:, None]

    # The smallest logit with which a token of each group could still win, rounded down.
    floor = top + temperature * (min_winning - max_noise - _SLACK).astype(np.float64)
    floor = np.maximum(np.nextafter(floor.astype(np.float32), np.float32(-np.inf)), cut)
    able = np.flatnonzero(maxima >= floor)
    row_index, groups = np.divmod(able, num_groups)
    values = gather_groups(table, racing[row_index], groups)
    index, offset = np.divmod(np.flatnonzero(values >= floor.reshape(-1)[able, None]), GROUP_TOKENS)
    row, tokens, values = row_index[index], groups[index] * GROUP_TOKENS + offset, values[index, offset]
    if allowed is not None:
        row, tokens = allowed.candidates(racing, row, tokens)
        values = table[racing[row], tokens]
    group = tokens // GROUP_TOKENS
    scores = (values - top[row, 0]) / temperature[row, 0]
    wait = token_waits(seeds[row], positions[row], tokens, waits[row, group], firsts[row, group])
    return _winners(row, tokens, scores - np.log(wait), len(racing))


def _winners(row: Int64, tokens: Int64, totals: Float32, count: int) -> Int64:
    """Return the token with the largest total in each of ``count`` rows. Candidate i is token ``tokens[i]`` of row
    ``row[i]``; candidates are sorted by row, then by token. Of equal totals the lowest token wins."""
    best = np.maximum.reduceat(totals, np.searchsorted(row, np.arange(count)))
    winning = np.flatnonzero(totals == best[row])
    winners: Int64 = tokens[winning[np.searchsorted(row[winning], np.arange(count))]]
    return winners
