"""Operations of a decoder layer, as plain functions over rows, which a backend can replace by kernels or fuse. The
order of roundings in bfloat16 is that of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import gelu, layer_norm, linear, relu, silu, softplus

from pillion.engine.models.layer_operations import MAX_MIXED_ROWS, XIELU_SLOPE, ClampedSwiglu, Experts


def rms_norm(values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute the RMS norm over the last dimension, in float32, rounded before the weight is applied, as in most
    families."""
    normed = values.float()
    normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(values.dtype)


def rms_norm_wide(values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute the RMS norm in float32, rounded after a float32 ``weight`` is applied: OLMo 2, Gemma (with 1 + w)."""
    normed = values.float()
    normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight).to(values.dtype)


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """RMS norm: :func:`rms_norm_wide` if ``wide``, else :func:`rms_norm`. The weight is [last dimension], or [heads,
    head_dim] for [T, heads, head_dim]."""

    weight: torch.Tensor
    eps: float
    wide: bool

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Norm values [T, ...] to the same shape and type."""
        return (rms_norm_wide if self.wide else rms_norm)(values, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """LayerNorm (arXiv 1607.06450) in float32, rounded once; weight and bias are float32 [last dimension], or [heads,
    head_dim] for [T, heads, head_dim]."""

    weight: torch.Tensor
    eps: float
    bias: torch.Tensor | None = None

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Norm values [T, ...] to the same shape and type."""
        floats, width = values.float(), self.weight.shape[-1:]
        if self.weight.dim() == 1:
            return layer_norm(floats, width, self.weight, self.bias, self.eps).to(values.dtype)
        normed = layer_norm(floats, width, None, None, self.eps) * self.weight
        return (normed if self.bias is None else normed + self.bias).to(values.dtype)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up; gate_up [T, 2 * inner], gate first -> [T, inner]."""
    gate, up = gate_up.chunk(2, -1)
    return silu(gate) * up


def geglu_tanh(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute gelu(gate) * up with gelu's tanh approximation; gate_up [T, 2 * inner], gate first -> [T, inner]."""
    gate, up = gate_up.chunk(2, -1)
    return gelu(gate, approximate="tanh") * up


def clamped_swiglu(gate_up: torch.Tensor, how: ClampedSwiglu) -> torch.Tensor:
    """Compute gpt-oss's activation; gate_up [T, 2 * inner], gate first -> [T, inner]."""
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=how.limit), up.clamp(-how.limit, how.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * how.alpha))


GATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": swiglu, "gelu_tanh": geglu_tanh}


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "gelu_tanh": lambda values: gelu(values, approximate="tanh"),
    "gelu": gelu,
    "relu": relu,
    "relu2": lambda values: relu(values).square(),
}


def xielu(values: torch.Tensor, bends: torch.Tensor) -> torch.Tensor:
    """Compute xIELU (arXiv 2411.13010) of values of any shape: a parabola above 0 and an exponential below. ``bends``:
    [2], alpha_p and alpha_n before their softplus."""
    above, below = xielu_factors(bends)
    squares, curve = above * values * values, below * (torch.expm1(values.clamp(max=0.0)) - values)
    return torch.where(values > 0, squares, curve) + XIELU_SLOPE * values


def xielu_factors(bends: torch.Tensor) -> torch.Tensor:
    """Return the factors of xIELU's parabola and exponential, float32 [2]."""
    above, below = softplus(bends.float())
    return torch.stack((above, below + XIELU_SLOPE))


def soft_cap(values: torch.Tensor, cap: float) -> torch.Tensor:
    """Compute cap * tanh(values / cap), in place: values stay within +-cap."""
    return values.div_(cap).tanh_().mul_(cap)


# Runs rows [n, hidden] through one expert -> [n, hidden]. Arguments: expert, rows, and the rows' indices [n].
RunExpert = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
# Changes a router's logits [n, experts] of rows [n, hidden] in place. Arguments: rows, logits, index of the first row.
ChangeLogits = Callable[[torch.Tensor, torch.Tensor, int], None]


def expert_activation(how: Experts) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the activation of a mixture's experts, from gate and up [T, 2 * inner], or only up, to [T, inner]."""
    clamped = how.clamped
    if not how.gated:
        return ACTIVATIONS[how.activation]
    return GATED[how.activation] if clamped is None else lambda gate_up: clamped_swiglu(gate_up, clamped)


@dataclass(frozen=True, slots=True)
class RouterBiases:
    """Adjustments of a router, each [num_experts] float32 or None: ``logits`` is added to its logits, ``choice`` to the
    scores for choosing experts; ``scales`` multiplies the final scores. ``change`` adds the adapters' logits."""

    logits: torch.Tensor | None = None
    choice: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    change: ChangeLogits | None = None


def mix_experts(
    rows: torch.Tensor,
    router: torch.Tensor,
    run: RunExpert,
    how: Experts,
    biases: RouterBiases | None = None,
    router_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute a mixture of experts over rows [T, hidden] -> [T, hidden]. The router is [num_experts, hidden]; its
    inputs are ``router_rows`` [T, hidden], or the rows if None.

    Tokens are sorted by expert, so that each used expert runs once per batch. A token's result depends on the batch
    only through the rounding of products. Rows are copied per expert, so at most MAX_MIXED_ROWS tokens are computed at
    a time, to limit memory.
    """
    chunks = [slice(begin, begin + MAX_MIXED_ROWS) for begin in range(0, len(rows), MAX_MIXED_ROWS)]
    if len(chunks) == 1:
        return _mix_chunk(rows, rows if router_rows is None else router_rows, router, run, how, biases, 0)
    out = torch.empty_like(rows)
    for chunk in chunks:
        router_chunk = (rows if router_rows is None else router_rows)[chunk]
        out[chunk] = _mix_chunk(rows[chunk], router_chunk, router, run, how, biases, chunk.start)
    return out


def _mix_chunk(
    rows: torch.Tensor,
    router_rows: torch.Tensor,
    router: torch.Tensor,
    run: RunExpert,
    how: Experts,
    biases: RouterBiases | None,
    first: int,
) -> torch.Tensor:
    """Compute a mixture over one chunk of the rows; ``first`` is the index of its first row."""
    scores, chosen = route(router_rows, router, how, biases, first)
    # Sorted row i is pair order[i] of (token, choice).
    order = chosen.view(-1).argsort(stable=True)
    counts = torch.bincount(chosen.view(-1), minlength=len(router))
    sources = order // how.per_token
    grouped = rows[sources]
    if how.scaled_inputs:
        grouped, scores = grouped * scores.view(-1)[order].to(rows.dtype)[:, None], torch.ones_like(scores)
    grouped = run_grouped(run, grouped, sources + first, counts)
    return combine(grouped, order, scores)


def route(
    rows: torch.Tensor, router: torch.Tensor, how: Experts, biases: RouterBiases | None = None, first: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts: returns their scores [T, k] float32 and indices [T, k]. ``first``: index of the
    first row."""
    biases = biases or RouterBiases()
    added, choice_bias = biases.logits, biases.choice
    if how.sigmoid or how.exact or choice_bias is not None:
        logits = linear(rows.float(), router.float(), added)
    else:
        logits = linear(rows, router, None if added is None else added.to(rows.dtype)).float()
    if biases.change is not None:
        biases.change(rows, logits, first)
    probabilities = logits.sigmoid() if how.sigmoid else torch.softmax(logits, -1)
    choice_scores = probabilities if choice_bias is None else probabilities + choice_bias.view(-1)
    if how.groups > 1:
        choice_scores = _mask_worse_groups(choice_scores, how)
    chosen = choice_scores.topk(how.per_token, -1).indices
    scores = probabilities.gather(-1, chosen)
    if how.normalize:
        scores = scores / scores.sum(-1, keepdim=True)
    if biases.scales is not None:
        scores = scores * biases.scales[chosen]
    return (scores if how.scale == 1.0 else scores * how.scale), chosen


def _mask_worse_groups(choices: torch.Tensor, how: Experts) -> torch.Tensor:
    """Return scores [T, experts] with -inf for experts outside of a token's best groups."""
    grouped = choices.view(len(choices), how.groups, -1)
    best_groups = grouped.topk(how.group_best, -1).values.sum(-1).topk(how.kept_groups, -1).indices
    excluded = torch.ones(grouped.shape[:2], dtype=torch.bool, device=choices.device).scatter_(1, best_groups, False)
    return grouped.masked_fill(excluded[..., None], -torch.inf).flatten(1)


def run_grouped(run: RunExpert, rows: torch.Tensor, numbers: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Run rows [N, hidden] through experts -> [N, hidden]: the first counts[0] rows through expert 0, the next
    counts[1] rows through expert 1, and so on. ``numbers`` [N]: indices of the rows in the step."""
    out = torch.empty_like(rows)
    begin = 0
    for number, count in enumerate(counts.tolist()):
        if count:
            own_rows = slice(begin, begin + count)
            out[own_rows] = run(number, rows[own_rows], numbers[own_rows])
            begin += count
    return out


def combine(grouped: torch.Tensor, order: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Compute each token's weighted sum of expert outputs -> [T, hidden]. ``scores``: [T, k]; row i of ``grouped``
    [T * k, hidden] is the output for token order[i] // k and its choice order[i] % k."""
    num_tokens, choices = scores.shape
    by_token = torch.empty_like(grouped)
    by_token[order] = grouped
    weights = scores.to(grouped.dtype)[:, None]
    return torch.bmm(weights, by_token.view(num_tokens, choices, -1))[:, 0]
