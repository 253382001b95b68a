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
    AddToResidual,
    AddUp,
    Again,
    ApplyTokenInputs,
    Attend,
    AttendLatents,
    DeltaRule,
    Experts,
    Gate,
    GrowQueries,
    Keep,
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
    Rotate,
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
    """One step of one layer, and the intermediate values of its operations.

    Attributes:
        tables: cosines and sines of the step's rows, by index of the rotary embedding.
        hidden: residual stream [T, hidden].
        growth: position-dependent query scale [T, 1, 1]; None in a model without.
        token_inputs: the layer's per-layer token inputs [T, width]; None in a model without.
        sample_rows: in the last layer, the rows that continue after its attention; None elsewhere.
        rows: the last operation's result [T, ...].
        kept: stack of rows kept for later operations.
        added_up: running sum of AddUp operations.
        rotated: queries and keys [T, heads, head_dim] after a norm or rotation.
        values: values [T, KV heads, head_dim] after a norm.
        gate: gate [T, ...] kept for a later operation.
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
    kept: list[torch.Tensor] = field(default_factory=list)
    added_up: torch.Tensor | None = None
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
        """Multiply rows [T, in] -> [T, out], including their adapters."""
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
        """Add the adapters' products of rows [n, in] to a layer's outputs [n, out], or to one expert's. ``numbers`` [n]
        are the rows' indices if they are not all rows in order."""
        if self.adapters is not None:
            adapters = self.adapters if numbers is None else self.adapters.of_rows(numbers)
            adapters.add(f"layers.{self.index}.{tensor.name}", rows, outputs, expert)

    def _expert(self, tensor: LayerTensor, number: int, rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Multiply the rows [n, in] of one expert by its matrix -> [n, out], including their adapters; ``numbers`` [n]
        are the rows' indices."""
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
        both, heads = self._queries_and_keys(), self.config.num_heads
        queries, keys = both[:, :heads].flatten(1), both[:, heads:].flatten(1)
        normed = self.weights.norm(operation.queries)(queries), self.weights.norm(operation.keys)(keys)
        self.rotated = torch.cat(normed, -1).view(both.shape)

    def rotate(self, operation: Rotate) -> None:
        self.rotated = rotate(self._queries_and_keys(), *self.tables[operation.rope])

    def grow(self, _: GrowQueries) -> None:
        assert self.growth is not None
        both, heads = self._queries_and_keys(), self.config.num_heads
        self.rotated = torch.cat(((both[:, :heads] * self.growth).to(both.dtype), both[:, heads:]), 1)

    def attend(self, operation: Attend) -> None:
        heads, source = self.config.num_heads, self.config.kv_source(self.index)
        both, wanted = self._queries_and_keys(), self.sample_rows
        if source == self.index:
            keys, values = both[:, heads:], self._values() if self.values is None else self.values
            self.attention.write(self.index, keys, values)
        if self.mixers == 1 and wanted is not None and not len(wanted):
            self.ended = True
            return
        sinks = None if operation.sinks is None else self.weights.tensor(operation.sinks)
        self.rows = self.attention.attend(source, both[:, :heads], operation.window, sinks)
        self._go_on_with_sampled()

    def _go_on_with_sampled(self) -> None:
        """In the last layer, continue with the sampled rows only, or end if there are none; not before the layer's last
        write of KV or states."""
        self.mixers -= 1
        wanted = self.sample_rows
        if wanted is None or self.mixers:
            return
        self.ended = not len(wanted)
        self.rows, self.hidden = self.rows[wanted], self.hidden[wanted]
        self.gate = None if self.gate is None else self.gate[wanted]
        self.token_inputs = None if self.token_inputs is None else self.token_inputs[wanted]
        self.adapters = None if self.adapters is None else self.adapters.of_rows(wanted)

    def keep_gate(self, operation: KeepGate) -> None:
        self.gate, self.rows = self.rows.tensor_split([operation.values.size], -1)

    def apply_gate(self, _: Gate) -> None:
        assert self.gate is not None
        by_gate = self.rows.view(*self.gate.shape, -1) * self.gate.sigmoid()[..., None]
        self.rows, self.gate = by_gate.flatten(1), None

    def short_convolution(self, operation: ShortConvolution) -> None:
        before, after, values = self.rows.chunk(3, -1)
        found = self._convolved((before * values).float(), operation.taps)
        self.rows = after * found.to(after.dtype)
        self._go_on_with_sampled()

    def delta(self, operation: DeltaRule) -> None:
        keys, values = operation.key_heads * operation.key_dim, operation.heads * operation.head_dim
        made, count = self.linear(operation.inputs, self.rows).float(), len(self.rows)
        mixed = silu(self._convolved(made[:, : 2 * keys + values].contiguous(), operation.taps))
        decays, rates = self._delta_rates(operation)
        rows = DeltaRows(
            mixed[:, :keys].view(count, -1, operation.key_dim),
            mixed[:, keys : 2 * keys].view(count, -1, operation.key_dim),
            mixed[:, 2 * keys :].view(count, -1, operation.head_dim),
            decays,
            rates,
        )
        found = torch.empty_like(rows.values)
        for mine, _, memory in self._states():
            found[mine] = delta_rule(rows.of(mine), memory)
        norm, sigmoid = self.weights.tensor(operation.norm), operation.gate_up is not None
        gates = self._of_few(operation.gate_down, operation.gate_up)
        gates = (made[:, 2 * keys + values :] if gates is None else gates).view(found.shape)
        normed = normed_and_gated(found, gates, norm, operation.eps, sigmoid=sigmoid)
        self.rows = normed.to(self.rows.dtype).flatten(1)
        self._go_on_with_sampled()

    def _delta_rates(self, operation: DeltaRule) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ``decays`` and ``rates`` of :class:`DeltaRows` for the step's rows."""
        made, decay = self.linear(operation.rates, self.rows).float(), self.weights.tensor(operation.decay)
        forgets = self._of_few(operation.forget_down, operation.forget_up)
        learns, forgets = made.chunk(2, -1) if forgets is None else (made, forgets.float())
        times = softplus(forgets + self.weights.tensor(operation.shift)).view(len(made), operation.heads, -1)
        return -decay.exp()[:, None] * times, learns.sigmoid() * (2.0 if operation.doubled else 1.0)

    def _of_few(self, down: LayerTensor | None, up: LayerTensor | None) -> torch.Tensor | None:
        """Multiply the rows by two matrices in sequence; None if there are none."""
        return None if down is None or up is None else self.linear(up, self.linear(down, self.rows))

    def state_space(self, operation: StateSpace) -> None:
        values, sides = operation.heads * operation.head_dim, operation.groups * operation.state_dim
        made, count = self.linear(operation.inputs, self.rows).float(), len(self.rows)
        gates, inputs, steps = made.tensor_split([values, 2 * values + 2 * sides], -1)
        mixed = silu(self._convolved(inputs.contiguous(), operation.taps))
        decay, shift, skip = (self.weights.tensor(one) for one in (operation.decay, operation.shift, operation.skip))
        rows = SpaceRows(
            mixed[:, :values].view(count, operation.heads, -1),
            mixed[:, values : values + sides].view(count, operation.groups, -1),
            mixed[:, values + sides :].view(count, operation.groups, -1),
            steps_of_time(steps, shift),
        )
        found = torch.empty_like(rows.values)
        for mine, _, memory in self._states():
            found[mine] = state_space(rows.of(mine), -decay.exp(), skip, memory)
        if operation.norm is None:
            normed = found.flatten(1) * silu(gates)
        else:
            grouped, weight = (count, operation.groups, -1), self.weights.tensor(operation.norm)
            weight, first = weight.view(operation.groups, -1), operation.gate_first
            gates = gates.reshape(grouped)
            normed = normed_and_gated(found.view(grouped), gates, weight, operation.eps, gate_first=first).flatten(1)
        self.rows = normed.to(self.rows.dtype)
        self._go_on_with_sampled()

    def selective_scan(self, operation: SelectiveScan) -> None:
        values, columns, dtype = operation.heads * operation.head_dim, operation.state_dim, self.rows.dtype
        made, gates = self.linear(operation.inputs, self.rows).float().tensor_split([values], -1)
        mixed = silu(self._convolved(made.contiguous(), operation.taps))
        ends = [operation.few, operation.few + columns]
        sides = self.linear(operation.sides, mixed.to(dtype)).tensor_split(ends, -1)
        norms = operation.step_norm, operation.write_norm, operation.read_norm
        few, writes, reads = (self.weights.norm(norm)(part) for norm, part in zip(norms, sides, strict=True))
        steps = softplus(self.linear(operation.steps, few).float())
        rows = ScanRows(mixed, writes.float(), reads.float(), steps)
        decay, skip = self.weights.tensor(operation.decay), self.weights.tensor(operation.skip)
        found = torch.empty_like(mixed)
        for mine, _, memory in self._states():
            found[mine] = selective_scan(rows.of(mine), -decay.exp(), skip, memory)
        self.rows = (found * silu(gates)).to(dtype)
        self._go_on_with_sampled()

    def _states(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield each sequence's rows with its state in this layer."""
        assert self.states is not None
        return self.states.of_layer(self.index)

    def _convolved(self, rows: torch.Tensor, taps: LayerTensor) -> torch.Tensor:
        """Return float32 rows [T, channels], each convolved with its predecessors in the sequence."""
        found, factors = torch.empty_like(rows), self.weights.taps(taps)
        for mine, inputs, _ in self._states():
            found[mine] = convolve(rows[mine], inputs, factors)
        return found

    def attend_latents(self, operation: AttendLatents) -> None:
        latents, wanted, count = self.config.latents, self.sample_rows, len(self.rows)
        assert latents is not None
        rows = self.rows
        if operation.query_down is not None and operation.query_norm is not None:
            rows = self.weights.norm(operation.query_norm)(self.linear(operation.query_down, rows))
        both = self.linear(operation.query_up, rows).view(count, -1, latents.head_dim)
        if operation.grows:
            assert self.growth is not None
            both = (both * self.growth).to(both.dtype)
        still, queries_turned = both.tensor_split([latents.still], -1)
        down, key_turned = self.linear(operation.down, self.rows).tensor_split([latents.rank], -1)
        ups = self.weights.tensor(operation.up).view(-1, latents.still + latents.values, latents.rank)
        key_up, value_up = ups.tensor_split([latents.still], 1)
        turned = torch.cat((queries_turned, key_turned[:, None]), 1)
        if operation.rope is not None:
            turned = rotate(turned, *self.tables[operation.rope])
        keys = torch.cat((self.weights.norm(operation.norm)(down)[:, None], turned[:, -1:]), -1)
        if operation.index is not None:
            keys = torch.cat((keys, self._index_keys(operation)[:, None]), -1)
        self.attention.write(self.index, keys)
        if self.mixers == 1 and wanted is not None and not len(wanted):
            self.ended = True
            return
        # Absorb each head's key projection into its queries.
        absorbed = torch.bmm(still.transpose(0, 1), key_up).transpose(0, 1)
        up, sizes = f"layers.{self.index}.{operation.up.name}", (latents.still, latents.values)
        if self.adapters is not None:
            self.adapters.add_by_head(up, sizes, 0, still, absorbed)
        queries = torch.cat((absorbed, turned[:, :-1]), -1)
        if operation.index is not None:
            self._select(operation, operation.index, rows)
            queries = pad(queries, (0, operation.index.dim))
        found = self.attention.attend(self.index, queries)
        self.rows = found.view(count, -1, self.config.head_dim)[..., : latents.rank]
        self._go_on_with_sampled()
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
        return self._turned(operation, keys[:, None])[:, 0]

    def _select(self, operation: AttendLatents, index: TokenIndex, few: torch.Tensor) -> None:
        """Select the tokens visible to the queries of this layer and of those that share its selection."""
        if operation.index_queries is None or operation.index_weights is None:
            return
        assert self.config.latents is not None
        queries = self.linear(operation.index_queries, few).view(len(few), index.heads, index.dim)
        weights = linear(self.rows.float(), self.weights.tensor(operation.index_weights).float())
        self._adapt(operation.index_weights, self.rows, weights)
        weights = weights * (index.heads * index.dim) ** -0.5
        first = self.config.latents.rank + self.config.latents.rotary
        assert isinstance(self.attention, StepAttention)
        self.attention.select(self.index, self._turned(operation, queries), weights, first, index.top)

    def _turned(self, operation: AttendLatents, heads: torch.Tensor) -> torch.Tensor:
        """Rotate the first values of index queries or keys [T, heads, dim]."""
        if operation.rope is None:
            return heads
        assert self.config.latents is not None
        turned, still = heads.tensor_split([self.config.latents.rotary], -1)
        return torch.cat((rotate(turned, *self.tables[operation.rope]), still), -1)

    def mlp(self, operation: Mlp) -> None:
        up = self.linear(operation.gate_up, self.rows)
        if operation.bends is not None:
            activated = xielu(up, self.weights.tensor(operation.bends)).to(up.dtype)
        else:
            activated = (GATED if operation.gated else ACTIVATIONS)[operation.activation](up)
        found = self.linear(operation.down, activated)
        if operation.row_gate is not None:
            gates = linear(self.rows, self.weights.tensor(operation.row_gate))
            self._adapt(operation.row_gate, self.rows, gates)
            found = gates.sigmoid() * found
        self.rows = found

    def keep(self, _: Keep) -> None:
        self.kept.append(self.rows)

    def again(self, _: Again) -> None:
        self.rows = self.kept.pop()

    def mix_experts(self, operation: Experts) -> None:
        act = expert_activation(operation)

        def run(number: int, rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            activated = act(self._expert(operation.gate_up, number, rows, numbers))
            return self._expert(operation.down, number, activated, numbers)

        def change(rows: torch.Tensor, products: torch.Tensor, first: int) -> None:
            self._adapt(operation.router, rows, products, torch.arange(first, first + len(rows)))

        router = self.weights.tensor(operation.router)
        added, choice, scales = (
            None if vector is None else self.weights.tensor(vector)
            for vector in (operation.router_bias, operation.choice_bias, operation.expert_scales)
        )
        norm = operation.router_norm
        read = None if norm is None else self.weights.norm(norm)(self.hidden)
        self.rows = mix_experts(self.rows, router, run, operation, RouterBiases(added, choice, scales, change), read)

    def add_up(self, operation: AddUp) -> None:
        found = self.rows if operation.norm is None else self.weights.norm(operation.norm)(self.rows)
        self.rows = self.added_up = found if self.added_up is None else self.added_up + found

    def apply_token_inputs(self, operation: ApplyTokenInputs) -> None:
        assert self.token_inputs is not None
        gate = ACTIVATIONS[operation.activation](self.linear(operation.gate, self.rows))
        self.rows = self.linear(operation.projection, gate * self.token_inputs)

    def scale(self, operation: ScaleResidual) -> None:
        self.hidden = self.hidden * self.weights.tensor(operation.factor)

    def add(self, operation: AddToResidual) -> None:
        found = self.rows if operation.norm is None else self.weights.norm(operation.norm)(self.rows)
        self.hidden = torch.add(self.hidden, found, alpha=operation.scale)

    def _projections(self) -> torch.Tensor:
        """Return queries, keys and values [T, heads, head_dim]; queries only in a layer that shares another one's
        KV."""
        return self.rows.view(len(self.rows), -1, self.config.heads_of(self.index).head_dim)

    def _values(self) -> torch.Tensor:
        return self._projections()[:, -self.config.heads_of(self.index).kv_heads :]

    def _queries_and_keys(self) -> torch.Tensor:
        if self.rotated is not None:
            return self.rotated
        every = self._projections()
        own = self.config.kv_source(self.index) == self.index
        return every[:, : -self.config.heads_of(self.index).kv_heads] if own else every


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
    Keep: LayerRun.keep,
    Again: LayerRun.again,
    Experts: LayerRun.mix_experts,
    AddUp: LayerRun.add_up,
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

    Takes token_ids and rope_rows [T], which index the rotary tables, and sample_rows [R], all int64. ``states``
    receives the inputs [T, hidden] of the layers that are its keys; ``carried`` are the recurrent states of the step's
    sequences, which are updated. No logits are computed for the last ``pooled`` sample_rows.

    Returns float32 logits [R - pooled, vocab], and the sampled rows after the last norm, [R, hidden]. The last layer
    only computes sampled rows, or nothing but its KV if there are none.
    """
    hidden = weights.embedding[token_ids]
    if weights.embedding_scale != 1.0:
        hidden = hidden * weights.embedding_scale
    if weights.positions is not None:
        hidden = hidden + weights.positions[rope_rows]
    beside = None if weights.token_inputs is None else weights.token_inputs.rows(token_ids, hidden)
    tables = [rope.tables(rope_rows, hidden.dtype) for rope in ropes]
    # With position-scaled queries (e.g. Llama 4), rope_rows are the positions.
    grows = None if config.query_growth is None else growth_factors(config.query_growth, rope_rows)[:, None, None]
    last = len(weights.layers) - 1
    # Without sampled rows, nothing is needed after the last KV write but states to keep.
    kept = last if states else config.last_kept_layer
    for index, (operations, layer) in enumerate(zip(weights.operations, weights.layers, strict=True)):
        if states is not None and index in states:
            states[index] = hidden
        wanted = sample_rows if index == last or (index == kept and not len(sample_rows)) else None
        inputs = None if beside is None else beside[:, index]
        run = LayerRun(config, index, layer, attention, tables, hidden, adapters, grows, inputs, wanted)
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
