"""A mixture of experts in the program of CPU kernels: normed rows -> what the chosen experts found, in hidden.

normed --router--> routing --> scores, experts --> groups --> grouped --gate, up--> activated --down--> found
hidden += each row's sum over its experts      (through a norm where the model has one behind its experts)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pillion.kernels.cpu.products.moe_kernels import Combine, GatherGroups, Group, Route
from pillion.kernels.cpu.program.program import Buffer, Operation

if TYPE_CHECKING:
    from pillion.engine.backends.cpu.cpu_model import Parts

# By ``ModelConfig.activation``.
GATED_EPILOGUE = {"silu": "gated_silu", "gelu_tanh": "gated_gelu"}


def moe_operations(parts: Parts, prefix: str) -> Iterator[Operation]:
    """The experts of the layer ``prefix``."""
    config, moe = parts.config, parts.config.moe
    assert moe is not None
    chosen = moe.experts_per_token
    unrounded = parts.buffer("unrounded", config.hidden_size, "float32")
    routing = parts.buffer("routing", moe.num_experts, "float32")
    scores, experts, places = (parts.buffer(name, chosen, "int32") for name in ("scores", "experts", "places"))
    sources = parts.buffer("sources", chosen, "int32")
    starts = parts.buffer("group_starts", moe.num_experts + 1, "int32")
    grouped = parts.buffer("grouped", config.hidden_size, parts.row_dtype, chosen)
    inner = parts.weights.linear(prefix + "experts.down").depth
    activated = parts.buffer("activated_groups", inner, parts.row_dtype, chosen)
    found = parts.buffer("found_groups", config.hidden_size, "float32", chosen)
    post_norm = prefix + "mlp_post_norm"
    out = parts.found if parts.weights.has(post_norm) else parts.hidden

    yield parts.norm(prefix + "mlp_norm", unrounded)
    yield parts.gemm(prefix + "router", unrounded, routing, "store")
    route = {"logits": routing, "scores": scores, "experts": experts, "stride": routing.stride}
    yield Operation(Route(moe.num_experts, chosen, moe.normalize, parts.rows_of), route, parts.when)
    group = {"experts": experts, "group_starts": starts, "places": places, "sources": sources}
    yield Operation(Group(moe.num_experts, chosen, parts.rows_of), group, parts.when)
    gather = {"rows": parts.normed, "sources": sources, "grouped": grouped, "stride": grouped.stride}
    yield Operation(GatherGroups(chosen, parts.rows_of), gather, parts.when)
    epilogue = GATED_EPILOGUE[config.activation]
    yield parts.gemm(prefix + "experts.gate_up", grouped, activated, epilogue, group_starts=starts)
    yield parts.gemm(prefix + "experts.down", activated, found, "store", group_starts=starts)
    yield _combine(parts, chosen, found, scores, places, out)
    if parts.weights.has(post_norm):
        yield parts.norm_add(post_norm)


def _combine(parts: Parts, chosen: int, found: Buffer, scores: Buffer, places: Buffer, out: Buffer) -> Operation:
    """Into hidden, or beside it where a norm follows."""
    adds = out == parts.hidden
    values = {
        "found": found,
        "scores": scores,
        "places": places,
        "out": out,
        "width": parts.config.hidden_size,
        "found_stride": found.stride,
        "out_stride": out.stride,
        "factor": parts.config.residual_scale if adds else 1.0,
    }
    return Operation(Combine(chosen, adds, parts.rows_of), values, parts.when)
