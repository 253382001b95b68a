"""The kernels around the grouped product against their references, and those against pillion.engine.models.layers."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.engine.models import layers
from pillion.kernels.cpu.products import moe_kernels as moe
from tests.support.cpu_references import reference_combine, reference_gather_groups, reference_group, reference_route
from tests.support.examples import examples
from tests.support.families import mixed
from tests.support.kernel_runner import normal, padded, rows_step, runner_of, stride

# (experts, chosen): below a vector, with a tail, as wide as real ones, and all of them.
SIZES = [(8, 2), (20, 4), (128, 8), (4, 4)]
ROUTES = [moe.RouteToExperts(*size, normalize) for size in SIZES for normalize in (False, True)]
# Sigmoids, and biases added to the scores to choose experts.
OTHER_ROUTES = [
    moe.RouteToExperts(*size, normalize, sigmoid=sigmoid, biased=biased)
    for size, normalize in (((20, 4), True), ((128, 8), False))
    for sigmoid, biased in ((True, False), (False, True), (True, True))
]
# (experts, chosen) in (groups, kept groups, best experts that count): DeepSeek V3's, V2's, and groups below a vector.
IN_GROUPS = [
    moe.RouteToExperts(256, 8, True, sigmoid=True, biased=True, groups=8, kept_groups=4),
    moe.RouteToExperts(160, 6, False, groups=8, kept_groups=3, group_best=1),
    moe.RouteToExperts(12, 3, True, sigmoid=True, groups=4, kept_groups=2),
    moe.RouteToExperts(42, 4, False, biased=True, groups=21, kept_groups=2),
]
CHOICES = (2, 4, 8)
SPECS = [
    *ROUTES,
    *OTHER_ROUTES,
    *IN_GROUPS,
    moe.RouteToExperts(8, 2, True, "samples"),
    *(moe.GroupByExpert(*size, rows_of) for size in SIZES for rows_of in ("tokens", "samples")),
    *(moe.GatherGroups(chosen) for chosen in CHOICES),
    moe.GatherGroups(2, "samples"),
    *(moe.GatherGroups(chosen, scaled=True, bf16=bf16) for chosen in (1, 4) for bf16 in (False, True)),
    moe.Combine(4, True, scored=False),
    *(moe.Combine(chosen, add) for chosen in CHOICES for add in (False, True)),
    moe.Combine(2, True, "samples"),
    *(moe.WeighRows(add, rows_of) for add in (False, True) for rows_of in ("tokens", "samples")),
]


runner = runner_of(SPECS)


def some_experts(rows, experts, chosen, seed=0):
    """[rows, chosen] int32, no expert twice in a row."""
    return normal(rows, experts, seed=seed).argsort(1)[:, :chosen].int().contiguous()


def step_of(spec, count):
    return rows_step(count, 0) if spec.rows_of == "tokens" else rows_step(0, count)


def run_route(runner, spec, logits, threads=3, bias=None, scale=1.0):
    room = padded(logits, extra=1, filler=torch.nan)
    # Values after the experts must not count.
    room[:, spec.experts :] = 1e30
    scores = torch.full((len(logits) + 1, spec.chosen), 7.0)
    experts = torch.full((len(logits) + 1, spec.chosen), 7, dtype=torch.int32)
    shift = None if bias is None else padded(bias[None], filler=torch.nan)
    values = {"logits": room, "scores": scores, "experts": experts, "stride": stride(room)}
    values |= {"bias": shift, "scale": scale}
    runner.run(spec, values, step_of(spec, len(logits)), threads)
    assert (scores[-1] == 7).all()
    assert (experts[-1] == 7).all()
    return scores[:-1], experts[:-1]


@pytest.mark.parametrize("spec", [*ROUTES, moe.RouteToExperts(8, 2, True, "samples")], ids=lambda spec: spec.name)
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_routing_matches_the_reference(runner, spec, spread):
    logits = normal(9, spec.experts) * spread
    scores, experts = run_route(runner, spec, logits)
    expected = reference_route(logits, spec.chosen, spec.normalize)
    torch.testing.assert_close(scores, expected[0], rtol=1e-5, atol=1e-7)
    # Experts whose scores round to 0 are equal.
    counts = expected[0] > 0
    assert torch.equal(experts[counts], expected[1][counts])


@pytest.mark.parametrize("spec", OTHER_ROUTES, ids=lambda spec: spec.name)
@pytest.mark.parametrize("shift", [0.0, -7.0, 7.0])
def test_biased_and_sigmoid_scores_match_the_reference(runner, spec, shift):
    logits, bias = normal(9, spec.experts), normal(spec.experts, seed=1) * 0.3 + shift
    bias = bias if spec.biased else None
    scores, experts = run_route(runner, spec, logits, bias=bias, scale=1.7)
    expected = reference_route(logits, spec.chosen, spec.normalize, spec.sigmoid, bias, 1.7)
    torch.testing.assert_close(scores, expected[0], rtol=1e-5, atol=1e-7)
    assert torch.equal(experts, expected[1])


@pytest.mark.parametrize("spec", IN_GROUPS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("shift", [0.0, -7.0])
def test_experts_of_the_best_groups(runner, spec, shift):
    logits, bias = normal(40, spec.experts), normal(spec.experts, seed=1) * 0.3 + shift
    bias = bias if spec.biased else None
    scores, experts = run_route(runner, spec, logits, bias=bias, scale=1.7)
    groups = spec.groups, spec.kept_groups, spec.group_best
    expected = reference_route(logits, spec.chosen, spec.normalize, spec.sigmoid, bias, 1.7, groups)
    torch.testing.assert_close(scores, expected[0], rtol=1e-5, atol=1e-7)
    assert torch.equal(experts, expected[1])
    apart = reference_route(logits, spec.chosen, spec.normalize, spec.sigmoid, bias, 1.7)
    assert not torch.equal(experts, apart[1])
    logits[3] = torch.nan
    broken = run_route(runner, spec, logits, bias=bias)[1]
    assert ((broken >= 0) & (broken < spec.experts)).all()
    assert torch.equal(broken[4:], experts[4:])


@settings(max_examples=examples(20))
@given(st.integers(1, 9), st.sampled_from(ROUTES), st.integers(0, 2**31))
def test_a_row_is_routed_by_itself(runner, count, spec, seed):
    logits = normal(count, spec.experts, seed=seed)
    scores, experts = run_route(runner, spec, logits)
    for row in range(count):
        found = run_route(runner, spec, logits[row : row + 1], threads=1)
        assert torch.equal(found[0][0], scores[row])
        assert torch.equal(found[1][0], experts[row])


def test_of_equal_experts_the_first_wins(runner):
    logits = torch.zeros(2, 20)
    logits[1, [3, 17, 18]] = 5.0
    _, experts = run_route(runner, moe.RouteToExperts(20, 4, True), logits)
    assert experts.tolist() == [[0, 1, 2, 3], [3, 17, 18, 0]]


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_broken_logits_choose_valid_experts(runner, poison):
    """The results of broken rows do not matter, but accesses stay in bounds, and other rows do not change."""
    spec = moe.RouteToExperts(20, 4, True)
    logits = normal(4, 20)
    whole = logits.clone()
    logits[1], logits[2, 5] = poison, poison
    scores, experts = run_route(runner, spec, logits)
    assert ((experts >= 0) & (experts < 20)).all()
    expected = run_route(runner, spec, whole)
    for row in (0, 3):
        assert torch.equal(scores[row], expected[0][row])
        assert torch.equal(experts[row], expected[1][row])


def run_group(runner, spec, experts):
    count = len(experts)
    starts = torch.full((spec.experts + 2,), 7, dtype=torch.int32)
    places, sources = (torch.full((count * spec.chosen + 1,), 7, dtype=torch.int32) for _ in range(2))
    values = {"experts": experts, "group_starts": starts, "places": places, "sources": sources}
    runner.run(spec, values, step_of(spec, count))
    assert starts[-1] == places[-1] == sources[-1] == 7
    return starts[:-1], places[:-1].view(experts.shape), sources[:-1]


@pytest.mark.parametrize(("size", "rows_of"), list(itertools.product(SIZES, ("tokens", "samples"))))
@pytest.mark.parametrize("count", [1, 3, 40])
def test_grouping_matches_the_reference(runner, size, rows_of, count):
    num_experts, chosen = size
    experts = some_experts(count, num_experts, chosen)
    found = run_group(runner, moe.GroupByExpert(num_experts, chosen, rows_of), experts)
    for one, expected in zip(found, reference_group(experts, num_experts), strict=True):
        assert torch.equal(one, expected)


@settings(max_examples=examples(20))
@given(st.integers(1, 30), st.integers(0, 2**31))
def test_groups_are_sorted_and_stable(runner, count, seed):
    """Even if an expert occurs twice in a row, as after broken logits."""
    experts = torch.randint(0, 8, (count, 2), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
    starts, places, sources = run_group(runner, moe.GroupByExpert(8, 2), experts)
    assert sorted(places.view(-1).tolist()) == list(range(2 * count))
    assert sources[places.long()].tolist() == [[row, row] for row in range(count)]
    for expert, (begin, end) in enumerate(itertools.pairwise(starts.tolist())):
        assert (experts.view(-1)[places.view(-1).argsort()][begin:end] == expert).all()
        assert sources[begin:end].tolist() == sorted(sources[begin:end].tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [moe.GatherGroups(2), moe.GatherGroups(2, "samples"), moe.GatherGroups(8)])
def test_gather_groups(runner, dtype, spec):
    rows = padded(normal(5, 40).to(dtype))
    sources = torch.randint(0, 5, (5 * spec.chosen,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    grouped = torch.full((len(sources) + 1, rows.shape[1]), 7.0, dtype=dtype)
    values = {"rows": rows, "sources": sources, "grouped": grouped, "stride": stride(rows)}
    runner.run(spec, {**values, "scores": None, "places": None}, step_of(spec, 5))
    assert torch.equal(grouped[:-1], reference_gather_groups(rows, sources))
    assert (grouped[-1] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chosen", [1, 4])
def test_rows_of_experts_are_scaled(runner, dtype, chosen):
    rows, scores = padded(normal(5, 40).to(dtype)), normal(5, chosen, seed=2)
    _, places, sources = reference_group(some_experts(5, 8, chosen), 8)
    grouped = torch.full((len(sources) + 1, rows.shape[1]), 7.0, dtype=dtype)
    values = {"rows": rows, "sources": sources, "grouped": grouped, "stride": stride(rows)}
    spec = moe.GatherGroups(chosen, scaled=True, bf16=dtype == torch.bfloat16)
    runner.run(spec, {**values, "scores": scores, "places": places}, step_of(spec, 5))
    wanted = torch.empty_like(grouped[:-1])
    wanted[places.view(-1).long()] = (rows[:, None].float() * scores[..., None]).to(dtype).flatten(0, 1)
    assert torch.equal(grouped[:-1], wanted)
    assert (grouped[-1] == 7).all()


def run_combine(runner, spec, out, found, scores, places, factor, threads=3):
    source, target = padded(found, 1, torch.nan), padded(out, 1, 7.0)
    values = {
        "found": source,
        "scores": scores,
        "places": places,
        "out": target,
        "width": out.shape[1],
        "found_stride": stride(source),
        "out_stride": stride(target),
        "factor": factor,
    }
    runner.run(spec, values, step_of(spec, len(out)), threads)
    assert (target[-1] == 7).all()
    assert (target[:-1, out.shape[1] :] == 0).all()
    return target[:-1, : out.shape[1]]


@pytest.mark.parametrize(
    "spec",
    [
        *(moe.Combine(chosen, add) for chosen in CHOICES for add in (False, True)),
        moe.Combine(2, True, "samples"),
        moe.Combine(4, True, scored=False),
    ],
    ids=lambda spec: spec.name,
)
@pytest.mark.parametrize(("count", "width", "factor"), [(1, 64, 1.0), (6, 40, 0.22)])
def test_combining_matches_the_reference(runner, spec, count, width, factor):
    out, found = normal(count, width), normal(count * spec.chosen, width, seed=1)
    scores = normal(count, spec.chosen, seed=2).softmax(-1)
    _, places, _ = reference_group(some_experts(count, 8, spec.chosen), 8)
    result = run_combine(runner, spec, out, found, scores, places, factor)
    expected = reference_combine(out, found, scores if spec.scored else scores * 0 + 1, places, factor, spec.add)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


@settings(max_examples=examples(15))
@given(st.integers(1, 8), st.integers(0, 2**31))
def test_a_row_is_combined_by_itself(runner, count, seed):
    """A row's pairs have other places when it is alone; the bits of their sum are the same."""
    spec, route = moe.Combine(4, True), moe.RouteToExperts(20, 4, True)
    out, by_pair = normal(count, 48, seed=seed), normal(count * 4, 48, seed=seed + 1)
    scores, experts = run_route(runner, route, normal(count, 20, seed=seed))

    def combined(first, last, threads):
        _, places, _ = run_group(runner, moe.GroupByExpert(20, 4), experts[first:last].contiguous())
        found = torch.empty(((last - first) * 4, 48))
        found[places.view(-1).long()] = by_pair[first * 4 : last * 4]
        return run_combine(runner, spec, out[first:last], found, scores[first:last].contiguous(), places, 1.0, threads)

    together = combined(0, count, 3)
    for row in range(count):
        assert torch.equal(combined(row, row + 1, 1)[0], together[row])


@pytest.mark.parametrize("rows_of", ["tokens", "samples"])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("count", "width", "factor"), [(1, 64, 1.0), (6, 40, 0.22)])
def test_rows_are_weighted(runner, add, rows_of, count, width, factor):
    """Rows after the last one do not change, nor does the memory of each row after its own."""
    spec = moe.WeighRows(add, rows_of)
    gates, found = padded(normal(count, 1, seed=1) * 3), padded(normal(count, width, seed=2))
    out = padded(normal(count, width), extra=1, filler=7.0)
    before = out.clone()
    values = {
        "gates": gates,
        "found": found,
        "out": out,
        "width": width,
        "factor": factor,
        **{f"{name}_stride": stride(each) for name, each in (("gates", gates), ("found", found), ("out", out))},
    }
    runner.run(spec, values, step_of(spec, count))
    expected = before[:count] * add + factor * gates[:, :1].sigmoid() * found
    torch.testing.assert_close(out[:count], expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(out[count:], before[count:])


@pytest.mark.parametrize("normalize", [False, True])
def test_the_references_are_the_torch_path(normalize):
    """The references equal the torch path in float32, if an expert multiplies by its number plus one."""
    rows, router = normal(7, 32), normal(8, 32, seed=1)
    scores, experts = reference_route(rows @ router.T, 2, normalize)
    expected_scores, expected_experts = layers.route(rows, router, mixed(2, normalize))
    torch.testing.assert_close(scores, expected_scores)
    assert torch.equal(experts.long(), expected_experts)
    starts, places, sources = reference_group(experts, 8)
    order = expected_experts.view(-1).argsort(stable=True)
    assert torch.equal(sources.long(), order // 2)
    assert starts.diff().tolist() == torch.bincount(expected_experts.view(-1), minlength=8).tolist()
    grouped = reference_gather_groups(rows, sources)
    for expert, (begin, end) in enumerate(itertools.pairwise(starts.tolist())):
        grouped[begin:end] *= expert + 1
    found = reference_combine(torch.zeros(7, 32), grouped, scores, places, 1.0, add=False)
    torch.testing.assert_close(found, layers.combine(grouped, order, scores))
