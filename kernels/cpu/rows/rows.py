"""Kernels that process each row by itself: embedding, norms, gathering of sampled rows, soft cap and argmax of logits.

The residual stream is float32 in models of any type. Inputs of products have the model's type, rounded once, after the
norm. ``rows_of`` says which rows a kernel processes: the step's "tokens" or its "samples".

In records, strides are bytes from row to row, and ``width`` is the number of values of a row. Rows and weights are
accessed up to the next multiple of 16 values; buffers are padded with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Bool, Int, Kernel, Ptr, Vec
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.language.module import KernelCall, KernelSpec
from pillion.kernels.cpu.language.records import RecordLayout

# Vectors, or groups, of logits per work item. Rows are divided because a step often samples fewer rows than there are
# threads.
_CHUNK_VECTORS = 64


@dataclass(frozen=True, slots=True)
class Embed(KernelSpec):
    """Embedding lookup: hidden [T, width] float32 = scale * rows of table [vocab, width], bfloat16 or float32,
    unpadded.

    ``width`` is at least 16. With ``share``, the table is this rank's part: ``tokens`` tokens from ``first`` on. Rows
    of other tokens become zeros.
    """

    layout = RecordLayout(
        "embed",
        pointers=("table", "hidden"),
        numbers=("width", "hidden_stride", "first", "tokens"),
        reals=("scale",),
    )

    bf16: bool
    share: bool = False

    def emit(self, call: KernelCall) -> None:
        k, args = call.k, call.args
        table, hidden, tokens = args.pointer("table"), args.pointer("hidden"), call.step.pointer("token_ids")
        width, stride = args.number("width"), args.number("hidden_stride")
        size = _itemsize(self.bf16)
        with call.even_share(call.step.number("num_tokens")) as row:
            token, target = k.load_int(tokens + row * 4, 32), hidden + row * stride
            if self.share:
                token = token - args.number("first")
                is_local = (token > -1) & (token < args.number("tokens"))
                with k.builder.if_else(is_local.ir) as (here, elsewhere):
                    with here:
                        self._row(call, table + token * width * size, target)
                    with elsewhere, k.range(vectors_of(width)) as i:
                        k.store(target + i * VECTOR_BYTES, k.vector(0.0))
            else:
                self._row(call, table + token * width * size, target)

    def _row(self, call: KernelCall, source: Ptr, target: Ptr) -> None:
        k, args, size = call.k, call.args, _itemsize(self.bf16)
        width, scale = args.number("width"), args.real("scale")
        with k.range(width // LANES) as i:
            k.store(target + i * VECTOR_BYTES, k.load_float(source + i * (LANES * size), self.bf16) * scale)
        # The table has no padding: unless width is a multiple of 16, the last vector overlaps the one before it.
        with k.when(width % LANES > 0):
            last = width - LANES
            k.store(target + last * 4, k.load_float(source + last * size, self.bf16) * scale)


@dataclass(frozen=True, slots=True)
class AddPositions(KernelSpec):
    """Learned position embedding: hidden [T, width] float32 += table [positions, ...] float32, with rows
    ``table_stride`` bytes apart and padded with zeros."""

    layout = RecordLayout(
        "add_positions", pointers=("table", "hidden"), numbers=("width", "hidden_stride", "table_stride")
    )

    def emit(self, call: KernelCall) -> None:
        k, args, positions = call.k, call.args, call.step.pointer("positions")
        table, hidden = args.pointer("table"), args.pointer("hidden")
        width, stride, table_stride = (args.number(field) for field in self.layout.numbers)
        with call.even_share(call.step.number("num_tokens")) as row:
            source, target = table + k.load_int(positions + row * 4, 32) * table_stride, hidden + row * stride
            with k.range(vectors_of(width)) as i:
                at = i * VECTOR_BYTES
                k.store(target + at, k.load(target + at) + k.load(source + at))


@dataclass(frozen=True, slots=True)
class NormRows(KernelSpec):
    """Norm of rows: out = norm(x) * weight (+ bias). x is float32, out bfloat16 or float32; weight and bias are float32
    [width].

    ``kind``: "rms" (Zhang and Sennrich 2019), "layer" (Ba et al. 2016), or "none", only a cast, for models that norm
    after their products.
    """

    layout = RecordLayout(
        "norm", pointers=("x", "weight", "bias", "out"), numbers=("width", "x_stride", "out_stride"), reals=("eps",)
    )

    kind: str
    bf16_out: bool
    rows_of: str = "tokens"
    bias: bool = False

    def emit(self, call: KernelCall) -> None:
        k, args = call.k, call.args
        x, out, weight, bias = (args.pointer(field) for field in ("x", "out", "weight", "bias"))
        width, x_stride, out_stride = (args.number(field) for field in ("width", "x_stride", "out_stride"))
        eps, vectors = args.real("eps"), vectors_of(width)
        with call.even_share(call.step.number(f"num_{self.rows_of}")) as row:
            source, target = x + row * x_stride, out + row * out_stride
            mean = row_mean(k, source, width) if self.kind == "layer" else None
            factor = None if self.kind == "none" else row_factor(k, source, width, eps, mean)
            with k.range(vectors) as i:
                value = k.load(source + i * VECTOR_BYTES)
                if factor is not None:
                    value = (value if mean is None else value - mean) * factor * k.load(weight + i * VECTOR_BYTES)
                if self.bias:
                    value = value + k.load(bias + i * VECTOR_BYTES)
                k.store_float(target + i * (LANES * _itemsize(self.bf16_out)), value, self.bf16_out)


@dataclass(frozen=True, slots=True)
class NormAdd(KernelSpec):
    """Norm of the output of attention or MLP, and residual add: hidden += factor * (RMS norm of ``found`` * weight),
    all float32."""

    layout = RecordLayout(
        "norm_add",
        pointers=("found", "weight", "hidden"),
        numbers=("width", "found_stride", "hidden_stride"),
        reals=("eps", "factor"),
    )

    rows_of: str = "tokens"

    def emit(self, call: KernelCall) -> None:
        k, args = call.k, call.args
        found, hidden, weight = (args.pointer(field) for field in ("found", "hidden", "weight"))
        width, found_stride, hidden_stride = (args.number(name) for name in ("width", "found_stride", "hidden_stride"))
        eps, factor, vectors = args.real("eps"), args.real("factor"), vectors_of(width)
        with call.even_share(call.step.number(f"num_{self.rows_of}")) as row:
            source, target = found + row * found_stride, hidden + row * hidden_stride
            norm = row_factor(k, source, width, eps)
            with k.range(vectors) as i:
                at = i * VECTOR_BYTES
                normed = k.load(source + at) * norm * k.load(weight + at)
                k.store(target + at, k.fma(normed, factor, k.load(target + at)))


@dataclass(frozen=True, slots=True)
class GatherRows(KernelSpec):
    """Gather of the sampled rows of the residual stream and of attention's output: [T, ...] -> [R, ...].

    Rows are copied with their padding; strides are multiples of 64 bytes, and equal in source and target. ``alone``:
    the residual stream only.
    """

    layout = RecordLayout(
        "gather_rows",
        pointers=("hidden", "attended", "sampled_hidden", "sampled_attended"),
        numbers=("hidden_stride", "attended_stride"),
    )

    alone: bool = False

    def emit(self, call: KernelCall) -> None:
        k, args, rows = call.k, call.args, call.step.pointer("sample_rows")
        count = call.step.number("num_samples")
        for name in ("hidden",) if self.alone else ("hidden", "attended"):
            source, target = args.pointer(name), args.pointer(f"sampled_{name}")
            stride = args.number(f"{name}_stride")
            with call.even_share(count) as i:
                k.copy(source + k.load_int(rows + i * 4, 32) * stride, target + i * stride, stride)


@dataclass(frozen=True, slots=True)
class SoftCapScale(KernelSpec):
    """Scaling and soft cap of logits [R, width] float32, in place: logits / ``divisor``, and if ``capped``, cap *
    tanh(logits / cap)."""

    layout = RecordLayout("soft_cap_scale", pointers=("logits",), numbers=("width", "stride"), reals=("divisor", "cap"))

    capped: bool

    def emit(self, call: KernelCall) -> None:
        k, args = call.k, call.args
        logits, stride, vectors = args.pointer("logits"), args.number("stride"), vectors_of(args.number("width"))
        divisor, cap = args.real("divisor"), args.real("cap")
        chunks = (vectors + (_CHUNK_VECTORS - 1)) // _CHUNK_VECTORS
        with call.even_share(call.step.number("num_logits") * chunks) as item:
            row, first = logits + item // chunks * stride, item % chunks * _CHUNK_VECTORS
            with k.range(k.min(first + _CHUNK_VECTORS, vectors), first) as i:
                at = row + i * VECTOR_BYTES
                value = k.load(at) / divisor
                k.store(at, k.tanh(value / cap) * cap if self.capped else value)


@dataclass(frozen=True, slots=True)
class GroupMaxima(KernelSpec):
    """Maximum of each group of logits: maxima [R, width / group] float32 of logits [R, width] float32.

    ``width`` is a multiple of ``group``, and ``group`` of 16. The maximum of a group with a NaN or an infinity is NaN.
    """

    layout = RecordLayout("group_maxima", pointers=("logits", "maxima"), numbers=("width", "stride", "maxima_stride"))

    group: int

    def emit(self, call: KernelCall) -> None:
        k, args, vectors = call.k, call.args, self.group // LANES
        logits, stride = args.pointer("logits"), args.number("stride")
        maxima, maxima_stride = args.pointer("maxima"), args.number("maxima_stride")
        groups = args.number("width") // self.group
        chunks = (groups + (_CHUNK_VECTORS - 1)) // _CHUNK_VECTORS
        with call.even_share(call.step.number("num_logits") * chunks) as item:
            row, first = item // chunks, item % chunks * _CHUNK_VECTORS
            with k.range(k.min(first + _CHUNK_VECTORS, groups), first) as group:
                values = [
                    k.load(logits + row * stride + group * (vectors * VECTOR_BYTES) + i * VECTOR_BYTES)
                    for i in range(vectors)
                ]
                largest, broken = values[0], values[0] - values[0]
                for value in values[1:]:
                    largest, broken = k.maximum(largest, value), broken + (value - value)
                k.store_first(maxima + row * maxima_stride + group * 4, k.max_lane(largest) + k.sum(broken))


@dataclass(frozen=True, slots=True)
class LargestTokens(KernelSpec):
    """Argmax of each row of logits by its group maxima: ``tokens`` int32 [R], ``tokens_stride`` bytes apart, is the
    first largest logit's index; -1 if a maximum is NaN. Other fields as in :class:`GroupMaxima`."""

    layout = RecordLayout(
        "largest_tokens",
        pointers=("logits", "maxima", "tokens"),
        numbers=("width", "stride", "maxima_stride", "tokens_stride"),
    )

    group: int

    def emit(self, call: KernelCall) -> None:
        k, args = call.k, call.args
        groups = args.number("width") // self.group
        with call.even_share(call.step.number("num_logits")) as row:
            maxima = args.pointer("maxima") + row * args.number("maxima_stride")
            group, finite = self._first_largest(k, maxima, groups)
            token = args.pointer("tokens") + row * args.number("tokens_stride")
            with k.builder.if_else(finite.ir) as (known, broken):
                with known:
                    logits = args.pointer("logits") + row * args.number("stride") + group * (self.group * 4)
                    within, _ = self._first_largest(k, logits, k.int(self.group))
                    k.store_int(token, group * self.group + within, 32)
                with broken:
                    k.store_int(token, -1, 32)

    def _first_largest(self, k: Kernel, values: Ptr, count: Int) -> tuple[Int, Bool]:
        """Return the index of the first largest of ``count`` float32, up to 2**24, and whether all are finite."""
        # Indices are float32, which represents all integers up to 2**24, here "no index".
        lowest, none = k.vector(-inf), k.vector(2.0**24)
        lanes = k.constant([float(lane) for lane in range(LANES)])
        largest, broken, index = k.variable(lowest), k.variable(k.vector(0.0)), k.variable(none)
        with k.range(vectors_of(count)) as i:
            value = k.select(k.below(i * LANES, count), k.load(values + i * VECTOR_BYTES), k.vector(0.0))
            broken.value = broken.value + (value - value)
            value = k.select(k.below(i * LANES, count), value, lowest)
            index.value = k.select(value > largest.value, lanes + k.real(i * LANES), index.value)
            largest.value = k.maximum(value, largest.value)
        maximum = k.max_lane(largest.value)
        # Each lane has the first index of its own maximum.
        first = k.select(largest.value < maximum, none, index.value)
        finite = k.select(k.sum(broken.value) < 1.0, k.vector(1.0), k.vector(0.0))
        smallest = k.vector(0.0) - k.max_lane(k.vector(0.0) - first)
        return k.first_as_int(smallest), k.first_as_int(finite) > 0


def vectors_of(width: Int) -> Int:
    """Return the number of vectors that contain ``width`` values."""
    return (width + (LANES - 1)) // LANES


def row_mean(k: Kernel, row: Ptr, width: Int) -> Vec:
    """Return the mean of ``width`` float32; zeros pad the last vector."""
    total = k.variable(k.vector(0.0))
    with k.range(vectors_of(width)) as i:
        total.value = total.value + k.load(row + i * VECTOR_BYTES)
    return k.sum(total.value) / k.real(width)


def row_squares(k: Kernel, row: Ptr, width: Int, mean: Vec | None = None) -> Vec:
    """Return the sum of squares of ``width`` float32, minus ``mean`` if given; zeros pad the last vector. The order of
    additions is fixed, so a row's bits do not depend on other rows."""
    total = k.variable(k.vector(0.0))
    with k.range(vectors_of(width)) as i:
        value = k.load(row + i * VECTOR_BYTES)
        if mean is not None:
            value = k.select(k.below(i * LANES, width), value - mean, k.vector(0.0))
        total.value = k.fma(value, value, total.value)
    return k.sum(total.value)


def row_factor(k: Kernel, row: Ptr, width: Int, eps: Vec, mean: Vec | None = None) -> Vec:
    """Return 1 / sqrt(mean square + eps) of a row, minus ``mean`` if given."""
    return squares_factor(k, row_squares(k, row, width, mean), width, eps)


def norm_factor(k: Kernel, squares: Vec, width: Int, eps: Vec) -> Vec:
    """Return 1 / sqrt(sum of the lanes of ``squares`` / width + eps)."""
    return squares_factor(k, k.sum(squares), width, eps)


def squares_factor(k: Kernel, squares: Vec, width: Int, eps: Vec) -> Vec:
    """Return 1 / sqrt(squares / width + eps) per lane."""
    return k.vector(1.0) / k.sqrt(squares / k.real(width) + eps)


def _itemsize(bf16: bool) -> int:
    return 2 if bf16 else 4
