"""A layer with a state in Qwen3-Next-80B's shape: chunks of a prompt's rows, and decodes of several texts.

A chunk is compared with the layer's input and output products; decodes with the bytes of their states, read and written
once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from lab.benchmarks.gpu.bench import Bench, Row, rotations, spread
from lab.benchmarks.gpu.calls import KernelCase
from pillion.engine.backends.gpu.gpu_step import StepShape
from pillion.engine.gpu_states.state_record import StateRecord
from pillion.engine.models.state_layout import state_layout
from pillion.kernels.gpu_states.gpu_convolutions import convolve
from pillion.kernels.gpu_states.gpu_delta_rule import DeltaShape, delta_rule, prepare_rows
from pillion.kernels.gpu_states.gpu_gates import norm_gated
from pillion.kernels.gpu_states.state_places import StepOfStates
from pillion.kernels.state_pieces import CHUNK
from pillion.kernels.step import Int32, LayerState, StateSlots, StepBatch
from pillion.kernels.torch.recurrences import DeltaRows
from pillion.kernels.torch.recurrences import delta_rule as reference

# Limit of the products around one text's rows and the kernels between them, in times the products.
MAX_TIMES = "<= 3"
# Context of decodes, within a chunk.
CONTEXT = 1003
TAPS, EPS = 4, 1e-6
# Rows compared with the token-by-token rule, in the model's type.
VERIFIED_ROWS, TOLERANCE = 2 * CHUNK + 5, 2.0**-5


@dataclass(frozen=True, slots=True)
class LayerOfStates:
    """The shape of a layer: its width, and its heads."""

    hidden: int
    delta: DeltaShape
    block_bytes: int

    @property
    def made(self) -> int:
        """Number of values that the product before the layer makes of a row: those to mix, and gates."""
        return self.delta.mixed + self.delta.heads * self.delta.head_dim


QWEN3_NEXT = LayerOfStates(2048, DeltaShape(16, 32, 128, 128), 393216)
TINY = LayerOfStates(32, DeltaShape(1, 2, 16, 16), 4096)


def run(bench: Bench) -> None:
    """Measure a prompt's rows, and decodes of one text and of several."""
    layer = TINY if bench.smoke else QWEN3_NEXT
    rows, streams = (24, (1, 2)) if bench.smoke else (2048, (1, 32))
    bench.attempt("results", lambda: _Case(bench, layer, [VERIFIED_ROWS], 0).verify())
    bench.attempt("chunk", lambda: _chunk(bench, layer, rows))
    for count in streams:
        bench.attempt(f"{count} decodes", lambda count=count: _decodes(bench, layer, count))  # type: ignore[misc]


def rule_case(bench: Bench, lengths: list[int], context: int) -> KernelCase:
    """Make a case of the rule alone, for rows of texts of these lengths after ``context`` tokens."""
    layer = TINY if bench.smoke else QWEN3_NEXT
    case = _Case(bench, layer, [min(lengths[0], 3)] if bench.smoke else lengths, context)
    moved = 2 * _state_bytes(layer, len(lengths))
    return KernelCase([case.rule], moved, lambda: _Case(bench, layer, [VERIFIED_ROWS], 0).verify())


def layer_kernels(bench: Bench, lengths: list[int], context: int) -> Callable[[], None]:
    """Return a call of all kernels of the layer, for texts of these lengths after ``context`` tokens."""
    return _Case(bench, TINY if bench.smoke else QWEN3_NEXT, lengths, context).kernels


def _state_bytes(layer: LayerOfStates, count: int) -> float:
    shape = layer.delta
    return 4.0 * count * (shape.heads * shape.key_dim * shape.head_dim + (TAPS - 1) * shape.mixed)


def _chunk(bench: Bench, layer: LayerOfStates, rows: int) -> None:
    case = _Case(bench, layer, [rows], 0)
    products, states = bench.time([case.products]), bench.time([case.kernels])
    for name, call in case.parts().items():
        bench.report(Row(f"{rows} rows of one text: {name}", bench.time([call]).median_s * 1e6, "us"))
    times = (products.median_s + states.median_s) / products.median_s
    more = {**spread(states), "products_us": products.median_s * 1e6}
    name = f"{rows} rows of one text: kernels between the products"
    bench.report(Row(name, states.median_s * 1e6, "us", times, "products alone", MAX_TIMES, more=more))


def _decodes(bench: Bench, layer: LayerOfStates, count: int) -> None:
    state_bytes = _state_bytes(layer, count)
    cases = [_Case(bench, layer, [1] * count, CONTEXT) for _ in range(rotations(2 * state_bytes, bench.smoke, most=8))]
    times = bench.time([case.kernels for case in cases])
    # States are read and written; also some rows of the unfinished chunk.
    bench.report_bytes(f"{count} decodes: kernels between the products", times, 2 * state_bytes)
    for name in cases[0].parts():
        times = bench.time([case.parts()[name] for case in cases])
        bench.report(Row(f"{count} decodes: {name}", times.median_s * 1e6, "us"))


class _Case:
    """A step's rows of some texts after ``context`` tokens, in one layer."""

    def __init__(self, bench: Bench, layer: LayerOfStates, lengths: list[int], context: int) -> None:
        self._layer, shape, device = layer, layer.delta, bench.device
        memories = shape.heads, shape.key_dim, shape.head_dim
        state = LayerState((TAPS - 1, shape.mixed), memories, keys=(shape.key_heads, shape.key_dim), rates=2)
        layout = state_layout([state], layer.block_bytes, CHUNK)
        assert layout is not None
        (pieces,) = layout.layers
        assert pieces is not None
        every = (pieces.inputs, pieces.memory, pieces.sides)
        self._inputs, self._memory, self._sides = (_places(part, device) for part in every)
        self._step = _step(bench, layer, lengths, context, -(-layout.nbytes // layer.block_bytes))
        rows, values = sum(lengths), shape.heads * shape.head_dim

        def made(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(*sizes, device=device).to(dtype)

        self._x, self._made = made(rows, layer.hidden), made(rows, layer.made)
        self._rates, self._mixed = made(rows, 2 * shape.heads), made(rows, shape.mixed)
        self._into, self._rating = made(layer.made, layer.hidden), made(2 * shape.heads, layer.hidden)
        self._out, self._result = made(layer.hidden, values), made(rows, layer.hidden)
        wide = torch.float32
        self._taps, self._norm = made(shape.mixed, TAPS, dtype=wide), made(shape.head_dim, dtype=wide)
        self._decay, self._shift = made(shape.heads, dtype=wide), made(shape.heads, dtype=wide)
        self._learns, self._forgets = made(rows, shape.heads, dtype=wide), made(rows, shape.heads, dtype=wide)
        self._solved = torch.empty(shape.solved_values(rows, len(lengths)), device=device)
        self._remembered, self._found = made(rows, values, dtype=wide), made(rows, values)

    def products(self) -> None:
        """Multiply by the matrices before and after the state's kernels."""
        torch.mm(self._x, self._into.T, out=self._made)
        torch.mm(self._x, self._rating.T, out=self._rates)
        torch.mm(self._found, self._out.T, out=self._result)

    def kernels(self) -> None:
        for call in self.parts().values():
            call()

    def parts(self) -> dict[str, Callable[[], None]]:
        """Return the kernels by name, in order."""
        return {"convolution": self._convolve, "unit length and rates": self._prepare, "rule": self.rule}

    def _convolve(self) -> None:
        convolve(self._made[:, : self._layer.delta.mixed], self._taps, None, self._mixed, self._step, self._inputs)

    def _prepare(self) -> None:
        shape, rates = self._layer.delta, self._rates
        prepare_rows(self._mixed, rates, self._decay, self._shift, self._learns, self._forgets, shape)

    def rule(self) -> None:
        """Run the rule, and the norm and the gates after it."""
        shape, rows = self._layer.delta, (self._mixed, self._learns, self._forgets)
        delta_rule(*rows, self._solved, self._remembered, self._step, self._memory, self._sides, shape)
        gates = self._made[:, shape.mixed :]
        norm_gated(self._remembered, gates, self._norm, self._found, EPS, groups=shape.heads)

    def verify(self) -> None:
        """Raise AssertionError if the rule's results differ from token-by-token ones."""
        shape, keys = self._layer.delta, self._layer.delta.key_heads * self._layer.delta.key_dim
        self._convolve()
        self._prepare()
        query, key, value = self._mixed.float().tensor_split([keys, 2 * keys], 1)
        query, key = (part.reshape(len(part), shape.key_heads, -1) for part in (query, key))
        values = value.reshape(len(value), shape.heads, -1)
        rows = DeltaRows(query, key, values, self._forgets[..., None], self._learns)
        memory = torch.zeros(shape.heads, shape.key_dim, shape.head_dim, device=value.device)
        wanted = reference(rows, memory).flatten(1)
        self.rule()
        torch.testing.assert_close(self._remembered, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def _places(pieces: tuple[tuple[int, int], ...], device: torch.device) -> torch.Tensor:
    places = [(page, at // 4) for page, at in pieces]
    return torch.tensor(places, dtype=torch.int32, device=device)


def _step(bench: Bench, layer: LayerOfStates, lengths: list[int], context: int, pages: int) -> StepOfStates:
    """Begin a step of texts of these lengths, with states somewhere in a pool."""
    count, rows = len(lengths), sum(lengths)
    order = np.random.default_rng(0).permutation(2 * count * pages).astype(np.int32).reshape(2, count, pages)
    pool = torch.randn(order.size, layer.block_bytes // 4, device=bench.device)
    record = StateRecord(pool, rows, count, pages, bench.device)
    starts: Int32 = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    contexts = np.array(lengths, np.int32) + context
    nothing = np.zeros(rows, np.int32)
    reads = order[0] if context else np.full_like(order[0], -1)
    tables = np.zeros((count, 1), np.int32)
    batch = StepBatch(nothing, nothing, starts, contexts, tables, nothing[:0], states=StateSlots(reads, order[1]))
    record.send(batch, StepShape(rows, 0, chunks=True))
    return record.step
