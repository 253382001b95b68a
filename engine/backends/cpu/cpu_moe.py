"""A mixture of experts in the program of CPU kernels: normed rows -> what the chosen experts found, in hidden.

normed --router--> routing --> scores, experts --> groups --> grouped --gate, up--> activated --down--> found
hidden += each row's sum over its experts      (through a norm where the model has one behind its experts)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pillion.kernels.cpu.products.moe_kernels import Combine, GatherGroups, Group, Route
from pillion.kernels.cpu.runtime.program import Buffer, Operation

if TYPE_CHECKING:
    from pillion.engine.backends.cpu.cpu_model import OperationBuilder

# By ``ModelConfig.activation``.
GATED_EPILOGUE = {"silu": "gated_silu", "gelu_tanh": "gated_gelu"}


def moe_operations(builder: OperationBuilder, prefix: str) -> Iterator[Operation]:
    """The experts of the layer ``prefix``."""
    config, moe = builder.config, builder.config.moe
    assert moe is not None
    chosen = moe.experts_per_token
    unrounded = builder.buffer("unrounded", config.hidden_size, "float32")
    routing = builder.buffer("routing", moe.num_experts, "float32")
    scores, experts, places = (builder.buffer(name, chosen, "int32") for name in ("scores", "experts", "places"))
    sources = builder.buffer("sources", chosen, "int32")
    starts = builder.buffer("group_starts", moe.num_experts + 1, "int32")
    grouped = builder.buffer("grouped", config.hidden_size, builder.row_dtype, chosen)
    inner = builder.weights.linear(prefix + "experts.down").depth
    activated = builder.buffer("activated_groups", inner, builder.row_dtype, chosen)
    found = builder.buffer("found_groups", config.hidden_size, "float32", chosen)
    post_norm = prefix + "mlp_post_norm"
    out = builder.found if builder.weights.has(post_norm) else builder.hidden

    yield builder.norm(prefix + "mlp_norm", unrounded)
    yield builder.gemm(prefix + "router", unrounded, routing, "store")
    route = {"logits": routing, "scores": scores, "experts": experts, "stride": routing.stride}
    yield Operation(Route(moe.num_experts, chosen, moe.normalize, builder.rows_of), route, builder.when)
    group = {"experts": experts, "group_starts": starts, "places": places, "sources": sources}
    yield Operation(Group(moe.num_experts, chosen, builder.rows_of), group, builder.when)
    gather = {"rows": builder.normed, "sources": sources, "grouped": grouped, "stride": grouped.stride}
    yield Operation(GatherGroups(chosen, builder.rows_of), gather, builder.when)
    epilogue = GATED_EPILOGUE[config.activation]
    yield builder.gemm(prefix + "experts.gate_up", grouped, activated, epilogue, group_starts=starts)
    yield builder.gemm(prefix + "experts.down", activated, found, "store", group_starts=starts)
    yield _combine(builder, chosen, found, scores, places, out)
    if builder.weights.has(post_norm):
        yield builder.norm_add(post_norm)


def _combine(
    builder: OperationBuilder, chosen: int, found: Buffer, scores: Buffer, places: Buffer, out: Buffer
) -> Operation:
    """Into hidden, or beside it where a norm follows."""
    adds = out == builder.hidden
    values = {
        "found": found,
        "scores": scores,
        "places": places,
        "out": out,
        "width": builder.config.hidden_size,
        "found_stride": found.stride,
        "out_stride": out.stride,
        "factor": builder.config.residual_scale if adds else 1.0,
    }
    return Operation(Combine(chosen, adds, builder.rows_of), values, builder.when)
