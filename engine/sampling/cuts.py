"""top_k, top_p and min_p, each as a *cut*: the smallest logit that a row may still draw.

The filters apply to scores = logits / temperature, in the order of Hugging Face's warpers. ``top_k`` keeps the k
largest; ``top_p`` keeps the shortest head of the rest, by falling probability, whose mass reaches p (the *nucleus*);
``min_p`` keeps tokens at least min_p times as likely as the most likely one. Each keeps all values above some number,
so a row's filters together are one number. Tokens that tie with the last one kept are kept as well: the set depends on
the logits and not on the order of equals.

A row's largest logits are found through its groups' maxima: the k largest are among those that reach the k-th largest
maximum. So top_k reads some groups and not the vocabulary. A *lone* nucleus, one without top_k, needs the mass of all
tokens. Its cut is computed only if it matters: mostly the token that wins among all tokens is inside the nucleus, as
one sum over the row shows (:func:`in_nucleus`), and then it also wins among those inside.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from pillion.engine.sampling.gumbel import GROUP_TOKENS
from pillion.kernels.step import Bool, Float32, Int64, SamplingRows

# Max groups that top_k may touch; a row above is cut alone, over the whole vocabulary.
MAX_HEAD_GROUPS = 256
# Min probability, relative to the likeliest token's, and max number of the tokens that a nucleus is first sought in.
_SHORT_NUCLEUS = np.float32(1e-4)
_SHORT_NUCLEUS_TOKENS = 4096
# Groups with the largest logits in which a nucleus is sought first. Their mass is reduced by far more than sums of all
# tokens can be off by rounding.
_NUCLEUS_GROUPS = 16
_LESS = 1 - 1e-4
# A longer nucleus is found by the mass per range of logits, and then token by token in one range. Ranges end at a
# weight of e^-32 of the largest; smaller weights share the last range.
_RANGES = 4096
_RANGE_END = 32.0


def cut_rows(rows: SamplingRows) -> Bool:
    """Return which rows draw from a part of their tokens, [R]."""
    found: Bool = (rows["top_k"] > 0) | (rows["top_p"] < 1.0) | (rows["min_p"] > 0.0)
    return found


def whole_groups(logits: torch.Tensor) -> Float32:
    """Return the logits C-contiguous, with a multiple of GROUP_TOKENS columns; if necessary a copy, padded with
    -inf."""
    missing = -logits.shape[1] % GROUP_TOKENS
    if missing:
        logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
    table: Float32 = logits.contiguous().numpy()
    return table


def group_maxima(table: Float32) -> Float32:
    """Return each group's largest logit, [R, W / 128], of a table [R, W]; NaN for groups that contain a NaN."""
    grouped = torch.from_numpy(table).view(len(table), -1, GROUP_TOKENS)
    maxima: Float32 = grouped.amax(-1).numpy()
    return maxima


def gather_groups(table: Float32, rows: Int64, groups: Int64) -> Float32:
    """Return the logits [..., 128] of ``groups`` of ``rows``, which broadcast."""
    per_row = table.shape[1] // GROUP_TOKENS
    values: Float32 = table.reshape(-1, GROUP_TOKENS)[rows * per_row + groups]
    return values


def heads(table: Float32, maxima: Float32, rows: Int64, counts: Int64, max_groups: int) -> tuple[Float32, Int64, Int64]:
    """Find at least the ``counts`` largest logits of each of ``rows``, both [F], through groups' maxima [F, G].

    Returns values [F, M] and their tokens [F, M], rising, padded at the end (-inf, -1), and the number of groups that
    each row touches [F]. A row above ``max_groups`` has no values.
    """
    num_groups = maxima.shape[1]
    falling = -np.sort(-maxima, axis=1)
    least = falling[np.arange(len(rows)), np.minimum(counts, num_groups) - 1]
    least[counts > num_groups] = -np.inf
    reaching = maxima >= least[:, None]
    touched = reaching.sum(axis=1)
    reaching[touched > max_groups] = False
    place, groups = np.divmod(np.flatnonzero(reaching), num_groups)
    values = gather_groups(table, rows[place], groups)
    found, within = np.divmod(np.flatnonzero(values >= least[place, None]), GROUP_TOKENS)
    owner = place[found]
    sizes = np.bincount(owner, minlength=len(rows))
    column = np.arange(len(owner)) - np.repeat(sizes.cumsum() - sizes, sizes)
    shape = (len(rows), max(1, int(sizes.max(initial=0))))
    padded, tokens = np.full(shape, -np.inf, np.float32), np.full(shape, -1, np.int64)
    padded[owner, column] = values[found, within]
    tokens[owner, column] = groups[found] * GROUP_TOKENS + within
    return padded, tokens, touched


def lone_nuclei(rows: SamplingRows, drawn: Int64, width: int) -> Int64:
    """Return which of ``drawn`` [S] have a lone nucleus: top_p, and no top_k below ``width`` tokens."""
    unlimited = (rows["top_k"][drawn] == 0) | (rows["top_k"][drawn] >= width)
    found: Int64 = np.flatnonzero((rows["top_p"][drawn] < 1.0) & unlimited)
    return found


def surely_in_nucleus(
    table: Float32, maxima: Float32, rows: SamplingRows, drawn: Int64, tokens: Int64
) -> npt.NDArray[np.bool_]:
    """Return which of ``tokens`` [S] of the rows ``drawn`` [S] top_p surely keeps, by the groups with the largest
    logits: these contain all likelier tokens, and so much mass that the nucleus extends beyond."""
    count = min(_NUCLEUS_GROUPS, maxima.shape[1])
    groups = np.argpartition(-maxima, count - 1, axis=1)[:, :count]
    top, temperature = maxima.max(axis=1)[:, None], rows["temperature"][drawn][:, None]
    own, least = table[drawn, tokens], np.take_along_axis(maxima, groups, 1).min(axis=1)
    values = gather_groups(table, drawn[:, None], groups).reshape(len(drawn), -1)
    weights = np.exp((values - top) / temperature)
    likelier = np.where(values > own[:, None], weights, 0).sum(axis=1, dtype=np.float64)
    reached = rows["top_p"][drawn] * weights.sum(axis=1, dtype=np.float64) * _LESS
    found: npt.NDArray[np.bool_] = (least <= own) & (likelier < reached)
    return found


def in_nucleus(row: Float32, top: np.float32, temperature: np.float32, top_p: float, token: int) -> bool:
    """Return whether ``top_p`` keeps ``token`` of row [W]: the mass of likelier tokens is below p."""
    weights = _weights(row, top, temperature)
    likelier = weights[weights > weights[token]].sum(dtype=np.float64)
    return bool(likelier < top_p * float(weights.sum()))


def cuts(table: Float32, maxima: Float32, rows: SamplingRows, drawn: Int64, *, lone: bool = True) -> Float32:
    """Return the cut of each row of ``drawn`` [S], -inf if any token may be drawn. ``maxima`` [S, G] are the rows'
    maxima by group; ``lone`` includes lone nuclei (:func:`lone_nuclei`)."""
    top, temperature = maxima.max(axis=1), rows["temperature"][drawn]
    top_p, min_p = rows["top_p"][drawn], rows["min_p"][drawn]
    top_k = np.where(rows["top_k"][drawn] < table.shape[1], rows["top_k"][drawn], 0)
    cut = np.full(len(drawn), -np.inf, np.float32)
    alone = np.zeros(len(drawn), dtype=bool)
    if lone:
        alone[lone_nuclei(rows, drawn, table.shape[1])] = True
    some = np.flatnonzero(top_k > 0)
    if len(some):
        values, _, touched = heads(table, maxima[some], drawn[some], top_k[some], MAX_HEAD_GROUPS)
        cut[some] = _head_cuts(-np.sort(-values, axis=1), top[some], temperature[some], top_k[some], top_p[some])
        alone[some[touched > MAX_HEAD_GROUPS]] = True
    for row in np.flatnonzero(alone):
        cut[row] = row_cut(table[drawn[row]], top[row], temperature[row], int(top_k[row]), float(top_p[row]))
    relative = np.flatnonzero(min_p > 0.0)
    if len(relative):
        floor = top[relative] + temperature[relative] * np.log(min_p[relative])
        cut[relative] = np.maximum(cut[relative], floor)
    return cut


def softmax_mass(row: Float32, top: np.float32, temperature: np.float32) -> float:
    """Return the sum of exp((row - top) / temperature) over a row [W]."""
    return float(_weights(row, top, temperature).sum())


def _head_cuts(falling: Float32, top: Float32, temperature: Float32, top_k: Int64, top_p: Float32) -> Float32:
    """Return cuts [F] by top_k and top_p from at least the top_k largest logits [F, M] of each row, falling."""
    each, width = np.arange(len(falling)), falling.shape[1]
    cut: Float32 = falling[each, np.minimum(top_k, width) - 1]
    if (top_p < 1.0).any():
        weights = np.exp((falling - top[:, None]) / temperature[:, None])
        weights[falling < cut[:, None]] = 0.0
        mass = weights.cumsum(axis=1, dtype=np.float64)
        last = (mass < top_p[:, None] * mass[:, -1:]).sum(axis=1)
        cut = np.where(top_p < 1.0, falling[each, np.minimum(last, width - 1)], cut)
    return cut


def row_cut(row: Float32, top: np.float32, temperature: np.float32, top_k: int, top_p: float) -> np.float32:
    """Return the cut of one row [W] by top_k (0: all) and top_p."""
    cut = np.float32(-np.inf)
    if top_k > 0:
        cut = np.partition(row, len(row) - top_k)[len(row) - top_k]
    if top_p == 1.0:
        return cut
    weights = _weights(row, top, temperature)
    if top_k > 0:
        weights[row < cut] = 0.0
    goal, before = top_p * float(weights.sum()), 0.0
    inside = np.flatnonzero(weights >= _SHORT_NUCLEUS)
    if len(inside) > _SHORT_NUCLEUS_TOKENS or weights[inside].sum(dtype=np.float64) < goal:
        depth = np.minimum((top - row) * (np.float32(_RANGES / _RANGE_END) / temperature), np.float32(_RANGES - 1))
        ranges = depth.astype(np.int64)
        mass = np.bincount(ranges, weights=weights, minlength=_RANGES).cumsum()
        goal = min(goal, float(mass[-1]))
        where = int(np.searchsorted(mass, goal))
        before = float(mass[where - 1]) if where else 0.0
        inside = np.flatnonzero((ranges == where) & (weights > 0.0))
    falling = -np.sort(-row[inside])
    reached = before + _weights(falling, top, temperature).cumsum(dtype=np.float64)
    return np.float32(falling[min(int(np.searchsorted(reached, goal)), len(falling) - 1)])


def _weights(row: Float32, top: np.float32, temperature: np.float32) -> Float32:
    scores = np.subtract(row, top)
    if temperature != 1.0:
        scores /= temperature
    return np.exp(scores, out=scores)
