"""top_k, top_p and min_p, each as a *cut*: the smallest logit that a row may still draw.

The filters apply to scores = logits / temperature, in the order of Hugging Face's warpers. ``top_k`` keeps the k
largest; ``top_p`` keeps the fewest of these, from the likeliest on, whose mass reaches p (the *nucleus*); ``min_p``
keeps tokens at least min_p times as likely as the most likely one. Each is a lower limit of the logits, so a row's
filters together are one number. Ties with the last token kept are kept as well, so the set does not depend on an order
among equal logits.

A row's largest logits are found by the maxima of its groups: the k largest logits are all at least the k-th largest
maximum. So top_k reads a few groups instead of the vocabulary. A *lone* nucleus, one without top_k, needs the mass of
all tokens. Its cut is rarely needed: a token is first drawn from the whole row, and if it is inside the nucleus, which
one sum over the row shows (:func:`in_nucleus`), it is also the winner inside.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from pillion.engine.sampling.gumbel import GROUP_TOKENS
from pillion.kernels.step import Bool, Float32, Int64, SamplingRows

# Max groups read for top_k; a row that needs more is cut by itself, over the whole vocabulary.
MAX_HEAD_GROUPS = 256
# Groups, those with the largest logits, by which :func:`surely_in_nucleus` decides.
_NUCLEUS_GROUPS = 16
# Bins of the histogram by which a long nucleus is cut.
_BINS = 4096


def cut_rows(rows: SamplingRows) -> Bool:
    """Return which rows have a filter (top_k, top_p or min_p), [R]."""
    filtered: Bool = (rows["top_k"] > 0) | (rows["top_p"] < 1.0) | (rows["min_p"] > 0.0)
    return filtered


def whole_groups(logits: torch.Tensor) -> Float32:
    """Return the logits C-contiguous, with a multiple of GROUP_TOKENS columns: padded with -inf, and copied if
    necessary."""
    padding = -logits.shape[1] % GROUP_TOKENS
    if padding:
        logits = torch.nn.functional.pad(logits, (0, padding), value=-torch.inf)
    table: Float32 = logits.contiguous().numpy()
    return table


def group_maxima(table: Float32) -> Float32:
    """Return each group's largest logit, [R, W / 128], of a table [R, W]; NaN for groups that contain a NaN."""
    grouped = torch.from_numpy(table).view(len(table), -1, GROUP_TOKENS)
    maxima: Float32 = grouped.amax(-1).numpy()
    return maxima


def gather_groups(table: Float32, rows: Int64, groups: Int64) -> Float32:
    """Return the logits [..., 128] of groups of rows; ``rows`` and ``groups`` broadcast to [...]."""
    per_row = table.shape[1] // GROUP_TOKENS
    values: Float32 = table.reshape(-1, GROUP_TOKENS)[rows * per_row + groups]
    return values


def heads(table: Float32, maxima: Float32, rows: Int64, counts: Int64, max_groups: int) -> tuple[Float32, Int64, Int64]:
    """Find at least the counts[i] largest logits of rows[i], by the maxima [F, G] of its groups.

    Returns logits [F, M] and their tokens [F, M], by ascending token, padded at the end with (-inf, -1), and the number
    of groups [F] that each row needs. Rows that need more than ``max_groups`` groups get no logits.
    """
    num_groups = maxima.shape[1]
    descending = -np.sort(-maxima, axis=1)
    least = descending[np.arange(len(rows)), np.minimum(counts, num_groups) - 1]
    least[counts > num_groups] = -np.inf
    needed = maxima >= least[:, None]
    num_needed = needed.sum(axis=1)
    needed[num_needed > max_groups] = False
    row_index, groups = np.divmod(np.flatnonzero(needed), num_groups)
    values = gather_groups(table, rows[row_index], groups)
    index, offset = np.divmod(np.flatnonzero(values >= least[row_index, None]), GROUP_TOKENS)
    owner = row_index[index]
    sizes = np.bincount(owner, minlength=len(rows))
    column = np.arange(len(owner)) - np.repeat(sizes.cumsum() - sizes, sizes)
    shape = (len(rows), max(1, int(sizes.max(initial=0))))
    padded, tokens = np.full(shape, -np.inf, np.float32), np.full(shape, -1, np.int64)
    padded[owner, column] = values[index, offset]
    tokens[owner, column] = groups[index] * GROUP_TOKENS + offset
    return padded, tokens, num_needed


def lone_nuclei(rows: SamplingRows, drawn: Int64, width: int) -> Int64:
    """Return the indices in ``drawn`` [S] of rows with a lone nucleus: top_p, and no top_k below ``width`` tokens."""
    unlimited = (rows["top_k"][drawn] == 0) | (rows["top_k"][drawn] >= width)
    lone: Int64 = np.flatnonzero((rows["top_p"][drawn] < 1.0) & unlimited)
    return lone


def surely_in_nucleus(
    table: Float32, maxima: Float32, rows: SamplingRows, drawn: Int64, tokens: Int64
) -> npt.NDArray[np.bool_]:
    """Return whether top_p surely keeps tokens[i] of row drawn[i]: whether the groups with the largest logits contain
    all likelier tokens, whose mass is less than p of these groups' mass. bool [S]."""
    count = min(_NUCLEUS_GROUPS, maxima.shape[1])
    groups = np.argpartition(-maxima, count - 1, axis=1)[:, :count]
    top, temperature = maxima.max(axis=1)[:, None], rows["temperature"][drawn][:, None]
    own, least = table[drawn, tokens], np.take_along_axis(maxima, groups, 1).min(axis=1)
    values = gather_groups(table, drawn[:, None], groups).reshape(len(drawn), -1)
    weights = np.exp((values - top) / temperature)
    likelier_mass = np.where(values > own[:, None], weights, 0).sum(axis=1, dtype=np.float64)
    # The factor allows for rounding errors of sums over whole rows.
    limit = rows["top_p"][drawn] * weights.sum(axis=1, dtype=np.float64) * (1 - 1e-4)
    inside: npt.NDArray[np.bool_] = (least <= own) & (likelier_mass < limit)
    return inside


def in_nucleus(row: Float32, top: np.float32, temperature: np.float32, top_p: float, token: int) -> bool:
    """Return whether ``top_p`` keeps ``token`` of a row [W]: whether the mass of likelier tokens is below p."""
    weights = _weights(row, top, temperature)
    likelier_mass = weights[weights > weights[token]].sum(dtype=np.float64)
    return bool(likelier_mass < top_p * float(weights.sum()))


def cuts(table: Float32, maxima: Float32, rows: SamplingRows, drawn: Int64, *, lone: bool = True) -> Float32:
    """Return the cut of each row in ``drawn`` [S]; -inf if it may draw any token. ``maxima``: of their groups [S, G].
    ``lone``: also apply lone nuclei (:func:`lone_nuclei`)."""
    top, temperature = maxima.max(axis=1), rows["temperature"][drawn]
    top_p, min_p = rows["top_p"][drawn], rows["min_p"][drawn]
    top_k = np.where(rows["top_k"][drawn] < table.shape[1], rows["top_k"][drawn], 0)
    cut = np.full(len(drawn), -np.inf, np.float32)
    by_row = np.zeros(len(drawn), dtype=bool)
    if lone:
        by_row[lone_nuclei(rows, drawn, table.shape[1])] = True
    limited = np.flatnonzero(top_k > 0)
    if len(limited):
        values, _, num_groups = heads(table, maxima[limited], drawn[limited], top_k[limited], MAX_HEAD_GROUPS)
        cut[limited] = _head_cuts(
            -np.sort(-values, axis=1), top[limited], temperature[limited], top_k[limited], top_p[limited]
        )
        by_row[limited[num_groups > MAX_HEAD_GROUPS]] = True
    for row in np.flatnonzero(by_row):
        cut[row] = row_cut(table[drawn[row]], top[row], temperature[row], int(top_k[row]), float(top_p[row]))
    with_min_p = np.flatnonzero(min_p > 0.0)
    if len(with_min_p):
        floor = top[with_min_p] + temperature[with_min_p] * np.log(min_p[with_min_p])
        cut[with_min_p] = np.maximum(cut[with_min_p], floor)
    return cut


def softmax_mass(row: Float32, top: np.float32, temperature: np.float32) -> float:
    """Return the sum of exp((row - top) / temperature) over a row [W]."""
    return float(_weights(row, top, temperature).sum())


def _head_cuts(descending: Float32, top: Float32, temperature: Float32, top_k: Int64, top_p: Float32) -> Float32:
    """Return cuts [F] by top_k and top_p from at least the top_k largest logits [F, M] of each row, in descending
    order."""
    each, width = np.arange(len(descending)), descending.shape[1]
    cut: Float32 = descending[each, np.minimum(top_k, width) - 1]
    if (top_p < 1.0).any():
        weights = np.exp((descending - top[:, None]) / temperature[:, None])
        weights[descending < cut[:, None]] = 0.0
        mass = weights.cumsum(axis=1, dtype=np.float64)
        last = (mass < top_p[:, None] * mass[:, -1:]).sum(axis=1)
        cut = np.where(top_p < 1.0, descending[each, np.minimum(last, width - 1)], cut)
    return cut


def row_cut(row: Float32, top: np.float32, temperature: np.float32, top_k: int, top_p: float) -> np.float32:
    """Return the cut of a row [W] by top_k (0: no limit) and top_p."""
    cut = np.float32(-np.inf)
    if top_k > 0:
        cut = np.partition(row, len(row) - top_k)[len(row) - top_k]
    if top_p == 1.0:
        return cut
    weights = _weights(row, top, temperature)
    if top_k > 0:
        weights[row < cut] = 0.0
    goal, likelier_mass = top_p * float(weights.sum()), 0.0
    # First attempt: only tokens with at least 1e-4 of the likeliest one's probability, if they are at most 4096.
    inside = np.flatnonzero(weights >= np.float32(1e-4))
    if len(inside) > 4096 or weights[inside].sum(dtype=np.float64) < goal:
        # Find the bin in which the mass reaches p, and then only sort its tokens. Weights below e^-32 of the largest
        # share the last bin.
        depth = np.minimum((top - row) * (np.float32(_BINS / 32) / temperature), np.float32(_BINS - 1))
        bins = depth.astype(np.int64)
        mass = np.bincount(bins, weights=weights, minlength=_BINS).cumsum()
        goal = min(goal, float(mass[-1]))
        cut_bin = int(np.searchsorted(mass, goal))
        likelier_mass = float(mass[cut_bin - 1]) if cut_bin else 0.0
        inside = np.flatnonzero((bins == cut_bin) & (weights > 0.0))
    descending = -np.sort(-row[inside])
    mass_up_to = likelier_mass + _weights(descending, top, temperature).cumsum(dtype=np.float64)
    return np.float32(descending[min(int(np.searchsorted(mass_up_to, goal)), len(descending) - 1)])


def _weights(row: Float32, top: np.float32, temperature: np.float32) -> Float32:
    """Return exp((row - top) / temperature), the unnormalized probabilities of a row [W]."""
    scores = np.subtract(row, top)
    if temperature != 1.0:
        scores /= temperature
    return np.exp(scores, out=scores)
