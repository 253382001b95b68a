"""The Triton kernels of layers with recurrent state, over slots of a pool, against recurrences in plain torch, token by
token: texts among others, and the same bits for any cut, within chunks and at their ends."""

from __future__ import annotations

from tests.support.gpu import DEVICE, rounded  # isort: skip  (before the kernels)

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch.nn.functional import silu, softplus

from pillion.engine.gpu_states.state_record import StateRecord
from pillion.engine.models.state_layout import state_layout
from pillion.errors import Internal
from pillion.kernels.gpu_states.gpu_convolutions import convolve
from pillion.kernels.gpu_states.gpu_delta_rule import DeltaShape, delta_rule, forget_factors, prepare_rows
from pillion.kernels.gpu_states.gpu_gates import group_squares, norm_gated
from pillion.kernels.gpu_states.gpu_selective_scan import ScanShape, selective_scan
from pillion.kernels.gpu_states.gpu_state_spaces import SpaceShape, state_space
from pillion.kernels.gpu_states.state_places import StepOfStates, most_chunks
from pillion.kernels.state_pieces import CHUNK
from pillion.kernels.step import LayerState, StateSlots
from pillion.kernels.torch import recurrences
from pillion.kernels.torch.recurrences import DeltaRows, ScanRows, SpaceRows, Taps
from tests.support.gpu_states import TextsWithStates

# Unused exponentials may overflow, as on a GPU.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TOKENS, TEXTS = 37, 3
# Each text alone and whole, and all of them together and cut: at chunks' ends, and several times within one.
APART = [[(text, TOKENS)] for text in range(TEXTS)]
MIXED = [[(0, 4), (1, 1)], [(1, 16), (0, 1), (2, 20)], [(0, 11), (1, 1), (2, 16)], [(0, 21), (1, 19), (2, 1)]]
CLOSE = rounded(torch.float32, 64)
# The models' rows are bfloat16 and states float32, of which products use the upper 16 bits.
HALVES = rounded(torch.float32, 512)
# Matrices are stored at the start of the last chunk.
WHOLE = TOKENS // CHUNK * CHUNK
# Computes the rows [T, ...] of a step.
Kernel = Callable[[StepOfStates, torch.Tensor, torch.Tensor], torch.Tensor]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def computed(state: LayerState, rows: torch.Tensor, kernel: Kernel) -> tuple[torch.Tensor, TextsWithStates]:
    """The results [texts, TOKENS, ...] of rows of the same shape, with the same bits for every cut and batch, and the
    states after them."""
    found = []
    for steps in (APART, MIXED):
        texts = TextsWithStates(state, TEXTS)
        done = [[] for _ in range(TEXTS)]
        for parts in steps:
            step, mine = texts.step(parts, padding=2)
            given = torch.cat([rows[text, begin:end] for text, begin, end in mine])
            padded = torch.cat((given, given.new_zeros(2, given.shape[1])))
            results = kernel(step, padded, texts.places)[: len(given)]
            for (text, _, _), part in zip(mine, results.split([end - begin for _, begin, end in mine]), strict=True):
                done[text].append(part)
        found.append((torch.stack([torch.cat(parts) for parts in done]), texts))
    (apart, one), (mixed, other) = found
    assert torch.equal(apart, mixed)
    for text in range(TEXTS):
        assert torch.equal(one.inputs(text), other.inputs(text))
        assert torch.equal(one.memory(text), other.memory(text))
    return mixed, other


@pytest.mark.parametrize("gated", [False, True])
def test_convolutions(gated):
    channels, count = 70, 3 if gated else 4
    dtype = torch.float16 if gated else torch.float32
    rows = random(TEXTS, TOKENS, (3 if gated else 1) * channels).to(dtype)
    taps, bias = random(channels, count, seed=1), None if gated else random(channels, seed=2)

    def kernel(step, x, places):
        out = torch.empty(len(x), channels, dtype=dtype, device=DEVICE)
        convolve(x, taps, bias, out, step, places.inputs, gated=gated)
        return out

    found, texts = computed(LayerState((count - 1, channels)), rows, kernel)
    for text in range(TEXTS):
        inputs, mine = torch.zeros(count - 1, channels, device=DEVICE), rows[text]
        if gated:
            before, after, values = mine.chunk(3, 1)
            convolved = recurrences.convolve((before * values).float(), inputs, Taps(taps))
            wanted = after * convolved.to(dtype)
        else:
            wanted = silu(recurrences.convolve(mine, inputs, Taps(taps, bias)))
        torch.testing.assert_close(found[text], wanted, **(rounded(dtype, 4) if gated else CLOSE))
        assert torch.equal(texts.inputs(text), inputs)


def test_channels_that_a_rank_only_keeps():
    """The pieces of a state that it shares with others are written whole, and its own channels are contiguous."""
    channels, own = 128, [*range(24, 40), *range(70, 128)]
    rows, taps = random(TEXTS, TOKENS, channels), random(channels, 4, seed=1)
    columns = torch.full((channels,), -1, dtype=torch.int32, device=DEVICE)
    columns[own] = torch.arange(len(own), dtype=torch.int32, device=DEVICE)
    state, found = LayerState((3, channels)), []
    for chosen, width in ((None, channels), (columns, len(own))):

        def kernel(step, x, places, chosen=chosen, width=width):
            out = torch.full((len(x), width), torch.nan, device=DEVICE)
            convolve(x, taps, None, out, step, places.inputs, columns=chosen)
            return out

        found.append(computed(state, rows, kernel))
    (whole, one), (part, other) = found
    assert torch.equal(part, whole[..., own])
    assert all(torch.equal(one.inputs(text), other.inputs(text)) for text in range(TEXTS))


@pytest.mark.parametrize(("by_rows", "dtype"), [(False, torch.float32), (True, torch.float32), (False, torch.bfloat16)])
def test_delta_rules(by_rows, dtype):
    shape = DeltaShape(4 if by_rows else 2, 4, 12, 16, doubled=not by_rows, by_rows=by_rows)
    decays = shape.heads * (shape.key_dim if by_rows else 1)
    rows = random(TEXTS, TOKENS, shape.mixed + shape.heads + decays)
    keys, values = shape.key_heads * shape.key_dim, shape.heads * shape.head_dim
    rows[..., : shape.mixed] = rows[..., : shape.mixed].to(dtype).float()
    # The tokens of this text have one key: the delta rule must erase what the first ones wrote.
    rows[2, :, keys : 2 * keys] = rows[2, 0, keys : 2 * keys]
    decay, shift = random(shape.heads, seed=1), random(decays, seed=2)
    solved = torch.empty(shape.solved_values(48, TEXTS + 1), device=DEVICE)

    def kernel(step, x, places):
        mixed, learns, forgets = (part.contiguous() for part in x.split([shape.mixed, shape.heads, decays], 1))
        mixed, rates = mixed.to(dtype), torch.cat((learns, forgets), 1)
        factors, made = torch.empty_like(forgets), torch.empty_like(learns)
        prepare_rows(mixed, learns if by_rows else rates, decay, shift, made, factors, shape)
        if by_rows:
            forget_factors(forgets, decay, shift, factors, shape)
        out = torch.empty(len(x), shape.heads * shape.head_dim, device=DEVICE)
        delta_rule(mixed, made, factors, solved, out, step, places.memory, places.sides, shape)
        return out

    memories, rates = (shape.heads, shape.key_dim, shape.head_dim), 1 + decays // shape.heads
    state = LayerState((0, 0), memories, keys=(shape.key_heads, shape.key_dim), rates=rates)
    found, texts = computed(state, rows, kernel)
    for text in range(TEXTS):
        parts = rows[text].split([keys, keys, values, shape.heads, decays], 1)
        query, key, value, learns, forgets = (
            part.unflatten(1, (-1, width))
            for part, width in zip(
                parts, (shape.key_dim, shape.key_dim, shape.head_dim, 1, decays // shape.heads), strict=True
            )
        )
        times = softplus(forgets + shift.view(shape.heads, -1))
        learns = learns[..., 0].sigmoid() * (2.0 if shape.doubled else 1.0)
        delta = DeltaRows(query, key, value, -decay.exp()[:, None] * times, learns)
        memory = torch.zeros(shape.heads, shape.key_dim, shape.head_dim, device=DEVICE)
        wanted = recurrences.delta_rule(delta.of(slice(WHOLE)), memory)
        # Keys of unit length are rounded to the model's type, as in transformers.
        near = CLOSE if dtype == torch.float32 else rounded(dtype, 4)
        torch.testing.assert_close(texts.memory(text), memory, **near)
        wanted = torch.cat((wanted, recurrences.delta_rule(delta.of(slice(WHOLE, None)), memory)))
        torch.testing.assert_close(found[text], wanted.flatten(1), **near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [SpaceShape(6, 16, 2, 24), SpaceShape(2, 16, 1, 200)], ids=["narrow", "wide"])
def test_state_spaces(shape, dtype):
    values, sides = shape.heads * shape.head_dim, shape.groups * shape.state_dim
    rows = random(TEXTS, TOKENS, shape.mixed + shape.heads).to(dtype).float()
    decay, shift, skip = (random(shape.heads, seed=seed) for seed in (1, 2, 3))

    def kernel(step, x, places):
        out = torch.empty(len(x), values, device=DEVICE)
        mixed, steps = x[:, : shape.mixed].to(dtype).contiguous(), x[:, shape.mixed :]
        state_space(mixed, steps, decay, shift, skip, out, step, places.memory, places.sides, shape)
        return out

    state = LayerState((0, 0), (shape.heads, shape.head_dim, shape.state_dim), True, (shape.groups, shape.state_dim), 1)
    found, texts = computed(state, rows, kernel)
    near = CLOSE if dtype == torch.float32 else HALVES
    if shape.state_dim > 128:
        # Eight times more products are added up.
        near = {name: 3 * most for name, most in near.items()}
    for text in range(TEXTS):
        value, write, read, steps = rows[text].split([values, sides, sides, shape.heads], 1)
        counts = (value, shape.heads), (write, shape.groups), (read, shape.groups)
        each = [part.unflatten(1, (count, -1)) for part, count in counts]
        memory = torch.zeros(shape.heads, shape.head_dim, shape.state_dim, device=DEVICE)
        space, rates = SpaceRows(*each, recurrences.steps_of_time(steps, shift)), -decay.exp()
        wanted = recurrences.state_space(space.of(slice(WHOLE)), rates, skip, memory)
        torch.testing.assert_close(texts.memory(text), memory, **near)
        wanted = torch.cat((wanted, recurrences.state_space(space.of(slice(WHOLE, None)), rates, skip, memory)))
        torch.testing.assert_close(found[text], wanted.flatten(1), **near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selective_scans(dtype):
    """A state has no rows of a chunk: its matrices are stored at the text's end."""
    shape = ScanShape(48, 24)
    widths = [shape.channels, shape.channels, shape.state_dim, shape.state_dim]
    rows = random(TEXTS, TOKENS, sum(widths)).to(dtype).float()
    decay, skip = random(shape.channels, shape.state_dim, seed=1), random(shape.channels, seed=2)

    def kernel(step, x, places):
        mixed, steps, writes, reads = x.to(dtype).split(widths, 1)
        out = torch.empty(len(x), shape.channels, device=DEVICE)
        mixed, steps = mixed.contiguous(), steps.contiguous()
        selective_scan(mixed, steps, writes, reads, decay, skip, out, step, places.memory, shape)
        return out

    found, texts = computed(LayerState((0, 0), (3, 16, shape.state_dim), transposed=True), rows, kernel)
    for text in range(TEXTS):
        value, steps, writes, reads = rows[text].split(widths, 1)
        memory = torch.zeros(3, 16, shape.state_dim, device=DEVICE)
        scanned = ScanRows(value, writes, reads, softplus(steps))
        wanted = recurrences.selective_scan(scanned, -decay.exp(), skip, memory)
        torch.testing.assert_close(texts.memory(text), memory, **CLOSE)
        torch.testing.assert_close(found[text], wanted, **CLOSE)


@pytest.mark.parametrize(
    ("groups", "own", "options"),
    [(3, False, {}), (3, False, {"sigmoid": True}), (3, True, {"gate_first": True}), (1, True, {"gate_first": True})],
)
def test_norms_and_gates(groups, own, options):
    tokens, values, eps = 4, 3 * 40, 1e-5
    x, wide = random(tokens, values), random(tokens, values + 7, seed=1).half()
    weight, gates, out = random(values if own else values // groups, seed=2), wide[:, 7:], torch.empty_like(x).half()
    norm_gated(x, gates, weight, out, eps, groups=groups, **options)
    grouped = [rows.reshape(tokens, groups, -1) for rows in (x, gates)]
    factors = weight.view(groups if own else 1, -1)
    wanted = recurrences.normed_and_gated(*grouped, factors, eps, **options).flatten(1)
    torch.testing.assert_close(out, wanted.half(), **rounded(torch.float16, 2))
    norm_gated(x, gates, None, out, eps)
    torch.testing.assert_close(out, (x * silu(gates.float())).half(), **rounded(torch.float16, 2))


@pytest.mark.parametrize("gate_first", [False, True])
def test_norms_of_a_group_that_ranks_share(gate_first):
    """Each has a part of group 1 of three, and writes 0 for the other groups, so that sums are right."""
    tokens, values, eps = 4, 2 * 40, 1e-5
    x, gates, weight = random(tokens, values), random(tokens, values, seed=1), random(values, seed=2)
    parts = [(rows[:, :40].contiguous(), rows[:, 40:].contiguous()) for rows in (x, gates)]
    means = [torch.full((tokens, 4), torch.nan, device=DEVICE) for _ in range(2)]
    for mine, gate, out in zip(*parts, means, strict=True):
        group_squares(mine, gate, out, 1, values, gate_first=gate_first)
        assert not out[:, [0, 2, 3]].any()
    summed, found = sum(means), []
    for mine, gate, factors in zip(*parts, (weight[:40], weight[40:]), strict=True):
        found.append(torch.empty_like(mine))
        norm_gated(mine, gate, factors, found[-1], eps, gate_first=gate_first, squares=summed[:, 1])
    grouped = (rows.reshape(tokens, 1, -1) for rows in (x, gates))
    wanted = recurrences.normed_and_gated(*grouped, weight.view(1, -1), eps, gate_first=gate_first).flatten(1)
    torch.testing.assert_close(torch.cat(found, 1), wanted, **CLOSE)


def test_the_exponentials_of_steps_of_time_do_not_cancel():
    """Time steps that are tiny, and ones that equal their softplus."""
    shape, steps = SpaceShape(1, 16, 1, 16), torch.tensor([[-40.0], [-12.0], [0.0], [30.0]], device=DEVICE)
    texts = TextsWithStates(LayerState((0, 0), (1, 16, 16), transposed=True, keys=(1, 16), rates=1), 1)
    step, _ = texts.step([(0, len(steps))])
    nothing, out = torch.full((1,), -torch.inf, device=DEVICE), torch.empty(len(steps), 16, device=DEVICE)
    zero, mixed = torch.zeros(1, device=DEVICE), torch.zeros(len(steps), shape.mixed, device=DEVICE)
    # Nothing decays, and each row writes and reads a separate place.
    mixed[:, :16] = 1.0
    mixed[:, 16:].view(len(steps), 2, 16)[:, :, : len(steps)] = torch.eye(len(steps), device=DEVICE)[:, None]
    places = texts.places
    state_space(mixed, steps, nothing, zero, zero, out, step, places.memory, places.sides, shape)
    torch.testing.assert_close(out, softplus(steps).expand(-1, 16), rtol=1e-5, atol=0)


def test_misshapen_tensors_are_refused():
    texts = TextsWithStates(LayerState((2, 70), (4, 24, 32), keys=(2, 24), rates=2), 1)
    step, _ = texts.step([(0, 2)])
    taps, shape, places = random(70, 3), DeltaShape(2, 4, 24, 32), texts.places
    for x, out, pieces in (
        (random(2, 70), random(2, 69), places.inputs),
        (random(2, 70).half(), random(2, 70), places.inputs),
        (random(49, 70), random(49, 70), places.inputs),
        (random(2, 70), random(2, 70), places.memory),
        (random(70, 2).T, random(2, 70), places.inputs),
    ):
        with pytest.raises(Internal):
            convolve(x, taps, None, out, step, pieces)
    enough = random(shape.solved_values(2, 2))
    for width, rates, solved, sides in (
        (223, 4, enough, places.sides),
        (224, 3, enough, places.sides),
        (224, 4, enough[1:], places.sides),
        (224, 4, enough, places.sides[1:]),
    ):
        rest = random(2, 4), solved, random(2, 128), step, places.memory, sides
        with pytest.raises(Internal):
            delta_rule(random(2, width), random(2, rates), *rest, shape)


@pytest.mark.parametrize(("tokens", "seqs"), [(1, 1), (48, 8), (8192, 256), (15, 4), (40, 40)])
def test_no_step_has_rows_of_more_chunks(tokens, seqs):
    """The max number of chunks is that of sequences whose first row is the last one of a chunk."""
    for count in range(1, min(tokens, seqs) + 1):
        longest = [tokens // count + (number < tokens % count) for number in range(count)]
        assert sum((CHUNK - 1 + rows + CHUNK - 1) // CHUNK for rows in longest) <= most_chunks(tokens, seqs)


def slots(*rows: Sequence[int]) -> np.ndarray:
    return np.array(rows, np.int32)


@pytest.mark.parametrize(
    ("states", "words"),
    [
        (None, "no slots for"),
        (StateSlots(slots([-1, -1]), slots([7, 8])), "written is outside of the pool of 8 slots"),
        (StateSlots(slots([-1, -1]), slots([-1, 3])), "written is outside of the pool"),
        (StateSlots(slots([8, 1]), slots([2, 3])), "read is outside of the pool"),
        (StateSlots(slots([0, 1]).astype(np.int64), slots([2, 3])), "int64"),
        (StateSlots(slots([0, 1], [4, 5]), slots([2, 3])), r"not int32 \[1, 2\]"),
    ],
)
def test_states_that_could_leave_the_pool_are_refused(states, words):
    record = StateRecord(torch.zeros(8, 64), 4, 2, 2, torch.device("cpu"))
    record.check(StateSlots(slots([-1, -1]), slots([0, 7])), 1)
    with pytest.raises(Internal, match=words):
        record.check(states, 1)


def test_the_layout_of_these_tests_has_pieces_in_several_slots():
    state = LayerState((0, 0), (4, 24, 32), keys=(2, 24), rates=2)
    places = state_layout([state], 4096, CHUNK)
    assert places is not None
    pieces = places.layers[0]
    assert len({page for page, _ in pieces.memory}) > 1 < len({page for page, _ in (*pieces.memory, *pieces.sides)})
