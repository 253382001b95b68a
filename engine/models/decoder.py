"""Forward pass of every model on torch: one decoder over a paged pool, which runs each layer's operations.

    hidden = embedding * embedding_scale
    each layer:  the operations listed by its family (:mod:`pillion.engine.models.layer_operations`)
    logits = soft_cap(lm_head(final_norm(hidden)) / logit_divisor)

Scales of 1 and caps of 0 are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import linear, pad, silu, softplus

from pillion.engine.adapters.step_adapters import StepAdapters
from pillion.engine.models.layer_operations import (
    AddToLayerSum,
    AddToResidual,
    ApplyTokenInputs,
    Attend,
    AttendLatents,
    DeltaRule,
    Experts,
    Gate,
    GrowQueries,
    KeepGate,
    Layer,
    LayerTensor,
    Mixer,
    Mlp,
    Multiply,
    Norm,
    NormHeads,
    NormProjections,
    NormValues,
    RestoreRows,
    Rotate,
    SaveRows,
    ScaleResidual,
    SelectiveScan,
    ShortConvolution,
    StateSpace,
    TokenIndex,
)
from pillion.engine.models.layer_weights import LayerWeights, ModelWeights
from pillion.engine.models.layers import (
    ACTIVATIONS,
    GATED,
    RouterBiases,
    expert_activation,
    mix_experts,
    rms_norm_wide,
    soft_cap,
    xielu,
)
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.rope import CosSin, Rope, growth_factors, rotate
from pillion.kernels.torch.recurrences import (
    DeltaRows,
    ScanRows,
    SpaceRows,
    convolve,
    delta_rule,
    normed_and_gated,
    selective_scan,
    state_space,
    steps_of_time,
)
from pillion.kernels.torch.step_states import StepStates
from pillion.kernels.torch.torch_attention import MixedAttention, StepAttention


@dataclass(slots=True)
class LayerRun:
    """One step of one layer: a method per operation (_RUN), and the intermediate values.

    Attributes:
        tables: cosines and sines of the step's rows, by index of the rotary embedding.
        hidden: residual stream [T, hidden].
        growth: position-dependent query scale [T, 1, 1]; None in a model without.
        token_inputs: the layer's per-layer token inputs [T, width]; None in a model without.
        sample_rows: in the last layer, the rows that continue after its attention; None elsewhere.
        rows: the last operation's result [T, ...].
        saved: stack of the rows of SaveRows operations.
        layer_sum: running sum of the AddToLayerSum operations so far; None before the first.
        rotated: queries and keys [T, heads, head_dim] if they are normed, scaled or rotated; else None.
        values: values [T, KV heads, head_dim] if they are normed; else None.
        gate: gate [T, ...] of the attention output, before its sigmoid; None without one.
        states: states of the step's sequences; None in a model without.
        mixers: remaining operations that write KV or states.
        ended: True if nothing is left to compute, because no row is sampled.
    """

    config: ModelConfig
    index: int
    weights: LayerWeights
    attention: StepAttention | MixedAttention
    tables: Sequence[CosSin]
    hidden: torch.Tensor
    adapters: StepAdapters | None = None
    growth: torch.Tensor | None = None
    token_inputs: torch.Tensor | None = None
    sample_rows: torch.Tensor | None = None
    rows: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    saved: list[torch.Tensor] = field(default_factory=list)
    layer_sum: torch.Tensor | None = None
    rotated: torch.Tensor | None = None
    values: torch.Tensor | None = None
    gate: torch.Tensor | None = None
    states: StepStates | None = None
    mixers: int = 1
    ended: bool = False

    def run(self, operations: Layer) -> torch.Tensor:
        """Run the layer's operations and return the residual stream."""
        self.mixers = sum(isinstance(operation, Mixer) for operation in operations)
        if not self.mixers and self.sample_rows is not None:
            self.hidden = self.hidden[self.sample_rows]
            self.adapters = None if self.adapters is None else self.adapters.of_rows(self.sample_rows)
            operations = operations if len(self.hidden) else ()
            self.ended = not operations
        for operation in operations:
            _RUN[type(operation)](self, operation)
            if self.ended:
                break
        return self.hidden

    def linear(self, tensor: LayerTensor, rows: torch.Tensor) -> torch.Tensor:
        """Multiply rows [T, in] by a matrix and add their adapters' products -> [T, out]."""
        outputs = self.weights.linear(tensor)(rows)
        self._adapt(tensor, rows, outputs)
        return outputs

    def _adapt(
        self,
        tensor: LayerTensor,
        rows: torch.Tensor,
        outputs: torch.Tensor,
        numbers: torch.Tensor | None = None,
        expert: int | None = None,
    ) -> None:
        """Add the adapters' products of rows [n, in] to the outputs [n, out] of a linear layer, or of one expert.
        ``numbers`` [n]: the rows' indices in the step; None if they are all rows."""
        if self.adapters is not None:
            adapters = self.adapters if numbers is None else self.adapters.of_rows(numbers)
            adapters.add(f"layers.{self.index}.{tensor.name}", rows, outputs, expert)

    def _expert(self, tensor: LayerTensor, number: int, rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Multiply the rows [n, in] of expert ``number`` by its matrix and add their adapters' products -> [n, out].
        ``numbers`` [n]: the rows' indices in the step."""
        outputs = self.weights.experts(tensor)[number](rows)
        self._adapt(tensor, rows, outputs, numbers, number)
        return outputs

    def norm(self, operation: Norm) -> None:
        self.rows = self.hidden if operation.weight is None else self.weights.norm(operation.weight)(self.hidden)

    def product(self, operation: Multiply) -> None:
        self.rows = self.linear(operation.matrix, self.rows)

    def head_norm(self, operation: NormHeads) -> None:
        self.rotated = self.weights.norm(operation.weight)(self._queries_and_keys())

    def value_norm(self, _: NormValues) -> None:
        self.values = rms_norm_wide(self._values(), torch.ones(()), self.config.rms_norm_eps)

    def projection_norm(self, operation: NormProjections) -> None:
        queries_and_keys, heads = self._queries_and_keys(), self.config.num_heads
        queries, keys = queries_and_keys[:, :heads].flatten(1), queries_and_keys[:, heads:].flatten(1)
        normed = self.weights.norm(operation.queries)(queries), self.weights.norm(operation.keys)(keys)
        self.rotated = torch.cat(normed, -1).view(queries_and_keys.shape)

    def rotate(self, operation: Rotate) -> None:
        self.rotated = rotate(self._queries_and_keys(), *self.tables[operation.rope])

    def grow(self, _: GrowQueries) -> None:
        assert self.growth is not None
        queries_and_keys, heads = self._queries_and_keys(), self.config.num_heads
        self.rotated = torch.cat(
            ((queries_and_keys[:, :heads] * self.growth).to(queries_and_keys.dtype), queries_and_keys[:, heads:]), 1
        )

    def attend(self, operation: Attend) -> None:
        heads, source = self.config.num_heads, self.config.kv_source(self.index)
        queries_and_keys, sampled = self._queries_and_keys(), self.sample_rows
        if source == self.index:
            keys, values = queries_and_keys[:, heads:], self._values() if self.values is None else self.values
            self.attention.write(self.index, keys, values)
        if self.mixers == 1 and sampled is not None and not len(sampled):
            self.ended = True
            return
        sinks = None if operation.sinks is None else self.weights.tensor(operation.sinks)
        self.rows = self.attention.attend(source, queries_and_keys[:, :heads], operation.window, sinks)
        self._drop_unsampled()

    def _drop_unsampled(self) -> None:
        """After the last layer's last write of KV or states, drop the rows that are not sampled; end if none is."""
        self.mixers -= 1
        sampled = self.sample_rows
        if sampled is None or self.mixers:
            return
        self.ended = not len(sampled)
        self.rows, self.hidden = self.rows[sampled], self.hidden[sampled]
        self.gate = None if self.gate is None else self.gate[sampled]
        self.token_inputs = None if self.token_inputs is None else self.token_inputs[sampled]
        self.adapters = None if self.adapters is None else self.adapters.of_rows(sampled)

    def keep_gate(self, operation: KeepGate) -> None:
        self.gate, self.rows = self.rows.tensor_split([operation.values.size], -1)

    def apply_gate(self, _: Gate) -> None:
        assert self.gate is not None
        by_gate = self.rows.view(*self.gate.shape, -1) * self.gate.sigmoid()[..., None]
        self.rows, self.gate = by_gate.flatten(1), None

    def short_convolution(self, operation: ShortConvolution) -> None:
        gate_in, gate_out, values = self.rows.chunk(3, -1)
        convolved = self._convolve((gate_in * values).float(), operation.taps)
        self.rows = gate_out * convolved.to(gate_out.dtype)
        self._drop_unsampled()

    def delta(self, operation: DeltaRule) -> None:
        keys, values = operation.key_heads * operation.key_dim, operation.heads * operation.head_dim
        projected, count = self.linear(operation.inputs, self.rows).float(), len(self.rows)
        mixed = silu(self._convolve(projected[:, : 2 * keys + values].contiguous(), operation.taps))
        decays, rates = self._delta_rates(operation)
        rows = DeltaRows(
            mixed[:, :keys].view(count, -1, operation.key_dim),
            mixed[:, keys : 2 * keys].view(count, -1, operation.key_dim),
            mixed[:, 2 * keys :].view(count, -1, operation.head_dim),
            decays,
            rates,
        )
        outputs = torch.empty_like(rows.values)
        for span, _, memory in self._states():
            outputs[span] = delta_rule(rows.of(span), memory)
        norm, sigmoid = self.weights.tensor(operation.norm), operation.gate_up is not None
        gates = self._low_rank(operation.gate_down, operation.gate_up)
        gates = (projected[:, 2 * keys + values :] if gates is None else gates).view(outputs.shape)
        normed = normed_and_gated(outputs, gates, norm, operation.eps, sigmoid=sigmoid)
        self.rows = normed.to(self.rows.dtype).flatten(1)
        self._drop_unsampled()

    def _delta_rates(self, operation: DeltaRule) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ``decays`` and ``rates`` of :class:`DeltaRows` for the step's rows."""
        projected, decay = self.linear(operation.rates, self.rows).float(), self.weights.tensor(operation.decay)
        forgets = self._low_rank(operation.forget_down, operation.forget_up)
        learns, forgets = projected.chunk(2, -1) if forgets is None else (projected, forgets.float())
        times = softplus(forgets + self.weights.tensor(operation.shift)).view(len(projected), operation.heads, -1)
        return -decay.exp()[:, None] * times, learns.sigmoid() * (2.0 if operation.doubled else 1.0)

    def _low_rank(self, down: LayerTensor | None, up: LayerTensor | None) -> torch.Tensor | None:
        """Return the product of the rows and a low-rank matrix, ``down`` then ``up``; None without a matrix."""
        return None if down is None or up is None else self.linear(up, self.linear(down, self.rows))

    def state_space(self, operation: StateSpace) -> None:
        values, sides = operation.heads * operation.head_dim, operation.groups * operation.state_dim
        projected, count = self.linear(operation.inputs, self.rows).float(), len(self.rows)
        gates, inputs, steps = projected.tensor_split([values, 2 * values + 2 * sides], -1)
        mixed = silu(self._convolve(inputs.contiguous(), operation.taps))
        decay, shift, skip = (
            self.weights.tensor(tensor) for tensor in (operation.decay, operation.shift, operation.skip)
        )
        rows = SpaceRows(
            mixed[:, :values].view(count, operation.heads, -1),
            mixed[:, values : values + sides].view(count, operation.groups, -1),
            mixed[:, values + sides :].view(count, operation.groups, -1),
            steps_of_time(steps, shift),
        )
        outputs = torch.empty_like(rows.values)
        for span, _, memory in self._states():
            outputs[span] = state_space(rows.of(span), -decay.exp(), skip, memory)
        if operation.norm is None:
            normed = outputs.flatten(1) * silu(gates)
        else:
            grouped, weight = (count, operation.groups, -1), self.weights.tensor(operation.norm)
            weight, first = weight.view(operation.groups, -1), operation.gate_first
            gates = gates.reshape(grouped)
            normed = normed_and_gated(outputs.view(grouped), gates, weight, operation.eps, gate_first=first).flatten(1)
        self.rows = normed.to(self.rows.dtype)
        self._drop_unsampled()

    def selective_scan(self, operation: SelectiveScan) -> None:
        values, columns, dtype = operation.heads * operation.head_dim, operation.state_dim, self.rows.dtype
        projected, gates = self.linear(operation.inputs, self.rows).float().tensor_split([values], -1)
        mixed = silu(self._convolve(projected.contiguous(), operation.taps))
        ends = [operation.few, operation.few + columns]
        sides = self.linear(operation.sides, mixed.to(dtype)).tensor_split(ends, -1)
        norms = operation.step_norm, operation.write_norm, operation.read_norm
        step_inputs, writes, reads = (self.weights.norm(norm)(part) for norm, part in zip(norms, sides, strict=True))
        steps = softplus(self.linear(operation.steps, step_inputs).float())
        rows = ScanRows(mixed, writes.float(), reads.float(), steps)
        decay, skip = self.weights.tensor(operation.decay), self.weights.tensor(operation.skip)
        outputs = torch.empty_like(mixed)
        for span, _, memory in self._states():
            outputs[span] = selective_scan(rows.of(span), -decay.exp(), skip, memory)
        self.rows = (outputs * silu(gates)).to(dtype)
        self._drop_unsampled()

    def _states(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield (rows, inputs of the convolution, matrices) of each sequence with a state in this layer."""
        assert self.states is not None
        return self.states.of_layer(self.index)

    def _convolve(self, rows: torch.Tensor, taps: LayerTensor) -> torch.Tensor:
        """Convolve float32 rows [T, channels] with their predecessors in the sequence."""
        outputs, factors = torch.empty_like(rows), self.weights.taps(taps)
        for span, inputs, _ in self._states():
            outputs[span] = convolve(rows[span], inputs, factors)
        return outputs

    def attend_latents(self, operation: AttendLatents) -> None:
        latents, sampled, count = self.config.latents, self.sample_rows, len(self.rows)
        assert latents is not None
        query_inputs = self.rows
        if operation.query_down is not None and operation.query_norm is not None:
            query_inputs = self.weights.norm(operation.query_norm)(self.linear(operation.query_down, query_inputs))
        q = self.linear(operation.query_up, query_inputs).view(count, -1, latents.head_dim)
        if operation.grows:
            assert self.growth is not None
            q = (q * self.growth).to(q.dtype)
        q_nope, q_rope = q.tensor_split([latents.qk_nope_head_dim], -1)
        latent_rows, k_rope = self.linear(operation.down, self.rows).tensor_split([latents.kv_lora_rank], -1)
        kv_up = self.weights.tensor(operation.up).view(
            -1, latents.qk_nope_head_dim + latents.v_head_dim, latents.kv_lora_rank
        )
        key_up, value_up = kv_up.tensor_split([latents.qk_nope_head_dim], 1)
        rotated = torch.cat((q_rope, k_rope[:, None]), 1)
        if operation.rope is not None:
            rotated = rotate(rotated, *self.tables[operation.rope])
        keys = torch.cat((self.weights.norm(operation.norm)(latent_rows)[:, None], rotated[:, -1:]), -1)
        if operation.index is not None:
            keys = torch.cat((keys, self._index_keys(operation)[:, None]), -1)
        self.attention.write(self.index, keys)
        if self.mixers == 1 and sampled is not None and not len(sampled):
            self.ended = True
            return
        # Absorb each head's key projection into its queries.
        q_absorbed = torch.bmm(q_nope.transpose(0, 1), key_up).transpose(0, 1)
        up, sizes = f"layers.{self.index}.{operation.up.name}", (latents.qk_nope_head_dim, latents.v_head_dim)
        if self.adapters is not None:
            self.adapters.add_by_head(up, sizes, 0, q_nope, q_absorbed)
        queries = torch.cat((q_absorbed, rotated[:, :-1]), -1)
        if operation.index is not None:
            self._select(operation, operation.index, query_inputs)
            queries = pad(queries, (0, operation.index.dim))
        attended = self.attention.attend(self.index, queries)
        self.rows = attended.view(count, -1, self.config.head_dim)[..., : latents.kv_lora_rank]
        self._drop_unsampled()
        values = torch.bmm(self.rows.transpose(0, 1), value_up.mT).transpose(0, 1)
        if self.adapters is not None:
            self.adapters.add_by_head(up, sizes, 1, self.rows, values)
        self.rows = values.flatten(1)

    def _index_keys(self, operation: AttendLatents) -> torch.Tensor:
        """Return the step's index keys [T, dim]; zeros in a layer without an indexer."""
        if operation.index_key is None or operation.index_norm is None:
            assert operation.index is not None
            return self.rows.new_zeros(len(self.rows), operation.index.dim)
        keys = self.weights.norm(operation.index_norm)(self.linear(operation.index_key, self.rows))
        return self._rotate_index(operation, keys[:, None])[:, 0]

    def _select(self, operation: AttendLatents, index: TokenIndex, query_inputs: torch.Tensor) -> None:
        """Select the tokens visible to the queries of this layer and of later layers without an indexer.
        ``query_inputs``: inputs of ``query_up``."""
        if operation.index_queries is None or operation.index_weights is None:
            return
        assert self.config.latents is not None
        queries = self.linear(operation.index_queries, query_inputs).view(len(query_inputs), index.heads, index.dim)
        weights = linear(self.rows.float(), self.weights.tensor(operation.index_weights).float())
        self._adapt(operation.index_weights, self.rows, weights)
        weights = weights * (index.heads * index.dim) ** -0.5
        first = self.config.latents.kv_lora_rank + self.config.latents.qk_rope_head_dim
        assert isinstance(self.attention, StepAttention)
        self.attention.select(self.index, self._rotate_index(operation, queries), weights, first, index.top)

    def _rotate_index(self, operation: AttendLatents, heads: torch.Tensor) -> torch.Tensor:
        """Apply the rotary embedding to the first values of index queries or keys [T, heads, dim]."""
        if operation.rope is None:
            return heads
        assert self.config.latents is not None
        rotated, unrotated = heads.tensor_split([self.config.latents.qk_rope_head_dim], -1)
        return torch.cat((rotate(rotated, *self.tables[operation.rope]), unrotated), -1)

    def mlp(self, operation: Mlp) -> None:
        up = self.linear(operation.gate_up, self.rows)
        if operation.bends is not None:
            activated = xielu(up, self.weights.tensor(operation.bends)).to(up.dtype)
        else:
            activated = (GATED if operation.gated else ACTIVATIONS)[operation.activation](up)
        outputs = self.linear(operation.down, activated)
        if operation.row_gate is not None:
            gates = linear(self.rows, self.weights.tensor(operation.row_gate))
            self._adapt(operation.row_gate, self.rows, gates)
            outputs = gates.sigmoid() * outputs
        self.rows = outputs

    def save_rows(self, _: SaveRows) -> None:
        self.saved.append(self.rows)

    def restore_rows(self, _: RestoreRows) -> None:
        self.rows = self.saved.pop()

    def mix_experts(self, operation: Experts) -> None:
        act = expert_activation(operation)

        def run(number: int, rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            activated = act(self._expert(operation.gate_up, number, rows, numbers))
            return self._expert(operation.down, number, activated, numbers)

        def change(rows: torch.Tensor, logits: torch.Tensor, first: int) -> None:
            self._adapt(operation.router, rows, logits, torch.arange(first, first + len(rows)))

        router = self.weights.tensor(operation.router)
        logit_bias, choice_bias, scales = (
            None if vector is None else self.weights.tensor(vector)
            for vector in (operation.router_bias, operation.choice_bias, operation.expert_scales)
        )
        norm = operation.router_norm
        router_rows = None if norm is None else self.weights.norm(norm)(self.hidden)
        self.rows = mix_experts(
            self.rows, router, run, operation, RouterBiases(logit_bias, choice_bias, scales, change), router_rows
        )

    def add_to_layer_sum(self, operation: AddToLayerSum) -> None:
        normed = self.rows if operation.norm is None else self.weights.norm(operation.norm)(self.rows)
        self.rows = self.layer_sum = normed if self.layer_sum is None else self.layer_sum + normed

    def apply_token_inputs(self, operation: ApplyTokenInputs) -> None:
        assert self.token_inputs is not None
        gate = ACTIVATIONS[operation.activation](self.linear(operation.gate, self.rows))
        self.rows = self.linear(operation.projection, gate * self.token_inputs)

    def scale(self, operation: ScaleResidual) -> None:
        self.hidden = self.hidden * self.weights.tensor(operation.factor)

    def add(self, operation: AddToResidual) -> None:
        normed = self.rows if operation.norm is None else self.weights.norm(operation.norm)(self.rows)
        self.hidden = torch.add(self.hidden, normed, alpha=operation.scale)

    def _projections(self) -> torch.Tensor:
        """Return queries, keys and values [T, heads, head_dim]; only queries in a layer that reads another layer's
        KV."""
        return self.rows.view(len(self.rows), -1, self.config.heads_of(self.index).head_dim)

    def _values(self) -> torch.Tensor:
        return self._projections()[:, -self.config.heads_of(self.index).kv_heads :]

    def _queries_and_keys(self) -> torch.Tensor:
        if self.rotated is not None:
            return self.rotated
        projections = self._projections()
        writes_kv = self.config.kv_source(self.index) == self.index
        return projections[:, : -self.config.heads_of(self.index).kv_heads] if writes_kv else projections


_RUN: dict[type, Callable[[LayerRun, Any], None]] = {
    Norm: LayerRun.norm,
    Multiply: LayerRun.product,
    NormHeads: LayerRun.head_norm,
    NormValues: LayerRun.value_norm,
    NormProjections: LayerRun.projection_norm,
    Rotate: LayerRun.rotate,
    GrowQueries: LayerRun.grow,
    Attend: LayerRun.attend,
    AttendLatents: LayerRun.attend_latents,
    KeepGate: LayerRun.keep_gate,
    Gate: LayerRun.apply_gate,
    ShortConvolution: LayerRun.short_convolution,
    DeltaRule: LayerRun.delta,
    StateSpace: LayerRun.state_space,
    SelectiveScan: LayerRun.selective_scan,
    Mlp: LayerRun.mlp,
    SaveRows: LayerRun.save_rows,
    RestoreRows: LayerRun.restore_rows,
    Experts: LayerRun.mix_experts,
    AddToLayerSum: LayerRun.add_to_layer_sum,
    ApplyTokenInputs: LayerRun.apply_token_inputs,
    ScaleResidual: LayerRun.scale,
    AddToResidual: LayerRun.add,
}


def run_decoder(
    config: ModelConfig,
    weights: ModelWeights,
    ropes: Sequence[Rope],
    attention: StepAttention | MixedAttention,
    token_ids: torch.Tensor,
    rope_rows: torch.Tensor,
    sample_rows: torch.Tensor,
    adapters: StepAdapters | None = None,
    states: dict[int, torch.Tensor] | None = None,
    carried: StepStates | None = None,
    pooled: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run T tokens, with their adapters, and write their KV.

    Takes int64 token_ids [T], rope_rows [T], which index the rotary tables, and sample_rows [R]. ``states`` receives
    the inputs [T, hidden] of the layers that are its keys; ``carried`` are the recurrent states of the step's
    sequences, which are updated. No logits are computed for the last ``pooled`` sample_rows.

    Returns float32 logits [R - pooled, vocab], and the sampled rows after the last norm, [R, hidden]. The last layer
    only computes sampled rows, or nothing but its KV if there are none.
    """
    hidden = weights.embedding[token_ids]
    if weights.embedding_scale != 1.0:
        hidden = hidden * weights.embedding_scale
    if weights.positions is not None:
        hidden = hidden + weights.positions[rope_rows]
    token_inputs = None if weights.token_inputs is None else weights.token_inputs.rows(token_ids, hidden)
    tables = [rope.tables(rope_rows, hidden.dtype) for rope in ropes]
    # With position-scaled queries (e.g. Llama 4), rope_rows are the positions.
    query_scales = (
        None if config.query_growth is None else growth_factors(config.query_growth, rope_rows)[:, None, None]
    )
    last = len(weights.layers) - 1
    # Without sampled rows, stop after the last write of KV or recurrent states, unless ``states`` needs later layers.
    last_needed = last if states else config.last_kept_layer
    for index, (operations, layer) in enumerate(zip(weights.operations, weights.layers, strict=True)):
        if states is not None and index in states:
            states[index] = hidden
        kept_rows = sample_rows if index == last or (index == last_needed and not len(sample_rows)) else None
        layer_inputs = None if token_inputs is None else token_inputs[:, index]
        run = LayerRun(config, index, layer, attention, tables, hidden, adapters, query_scales, layer_inputs, kept_rows)
        run.states = carried
        hidden = run.run(operations)
        if run.ended:
            return torch.empty((0, config.vocab_size), dtype=torch.float32), hidden[:0]
    normed = weights.final_norm(hidden)
    return _logits(config, weights, normed[: len(normed) - pooled]), normed


def _logits(config: ModelConfig, weights: ModelWeights, normed: torch.Tensor) -> torch.Tensor:
    logits = weights.lm_head(normed).float()
    if config.logit_divisor != 1.0:
        logits = logits.div_(config.logit_divisor)
    return soft_cap(logits, config.logit_softcap) if config.logit_softcap else logits
