"""The GPU backend against transformers: every family, and steps that are padded, launched ahead and captured."""

from __future__ import annotations

from tests.support.gpu_model import MAX_SEQS, GpuDriver, gpu_backend, make_family  # isort: skip  (before the kernels)

import contextlib
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lab.testbed.tiny_model import save_model
from pillion.config import DecodeFlags, ModelFlags, PrefillFlags
from pillion.engine.backends.backend import BackendLost, warm_up_batches
from pillion.engine.backends.gpu import gpu_graphs
from pillion.engine.backends.gpu.gpu_backend import SCRATCH_SLOTS
from pillion.engine.backends.gpu.gpu_experts import GpuExperts
from pillion.engine.backends.gpu.gpu_graphs import MAX_GRAPH_TOKENS, StepGraphs, sizes_for
from pillion.engine.backends.gpu.gpu_loading import limits_of
from pillion.engine.backends.gpu.gpu_model import GpuModel
from pillion.engine.backends.step_memory import step_bytes
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.layer_operations import MAX_MIXED_ROWS
from pillion.engine.sampling.sampler import sample
from pillion.engine.scheduling.scheduler import scored_rows
from pillion.errors import ConfigError, Internal
from pillion.kernels.step import MASK_LATE, RowEdit, SamplingRows
from pillion.settings.speculative_config import SpeculativeConfig
from pillion.types import SamplingParams
from tests.support.families import FAMILIES, OF_INDEXERS, PROMPT_TOKENS, SAME_AT_ANY_LENGTH, make_model, tokens_of
from tests.support.gpu import NATIVE
from tests.support.sampling import GivenMasks
from tests.support.scored_prompts import check_scores, run_scored

pytestmark = pytest.mark.usefixtures("own_cache")

# Logits are of the order of 10: this is a few units in the last place of fp32 after the sums of some layers. On a GPU
# float32 products are cuBLAS's, in another order.
TOLERANCE = 1e-3 if NATIVE else 1e-4


def close(got, wanted):
    torch.testing.assert_close(got.cpu(), wanted, atol=TOLERANCE, rtol=TOLERANCE)


# In the interpreter a step takes a second: one family per property that needs several steps, all but one long.
INTERPRETED = (
    "olmo2",
    *(
        pytest.param(family, marks=pytest.mark.long)
        for family in (
            "mixtral",
            "gemma2",
            "cohere",
            "glm4",
            "youtu",
        )
    ),
)


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {*OF_INDEXERS}) if NATIVE else INTERPRETED)
def test_families(family, tmp_path):
    """Run a text in chunks, and in a batch with decodes of another text."""
    folder, flags = make_family(tmp_path / "model", family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    # Longer than the families' windows of 24; tokens are slow in the interpreter.
    length, part = (PROMPT_TOKENS, 37) if NATIVE else (40, 17)
    text, other = tokens_of(length, 2), tokens_of(length, 3)
    with torch.inference_mode():
        wanted, beside = (model(torch.tensor([tokens])).logits[0].float() for tokens in (text, other))
    driver = GpuDriver(prepare(flags), num_slots=40)
    (number,) = driver.sequences.add()
    split = [33, 1, 3] if NATIVE else [25]
    close(driver.run_all(number, text, split), wanted)
    one, two = driver.sequences.add(2)
    driver.step((one, other[:part]), sample=())
    got = driver.step((one, other[part : part + 1]), (two, text[: part + 3]), sample=[0, 1, part + 3])
    close(got, torch.stack((beside[part], wanted[0], wanted[part + 2])))
    got = driver.step((two, text[part + 3 : part + 4]), (one, other[part + 1 : part + 2]))
    close(got, torch.stack((wanted[part + 3], beside[part + 1])))


# Heads of these families would be too small, or norms or rotations require a width.
WIDE = ("gpt2", "helium", "olmoe", "opt", "phi3-longrope-short")


@pytest.mark.skipif(NATIVE, reason="test_families runs every family")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "family",
    [
        "opt",
        *(pytest.param(one, marks=pytest.mark.long) for one in SAME_AT_ANY_LENGTH if one not in ("opt", *OF_INDEXERS)),
    ],
)
def test_logits_of_every_family_match_transformers(family, tmp_path):
    """A chunk, and then a decode beside another chunk, each of a number of rows that is padded."""
    # Tiles of weights are slow in the interpreter.
    sizes = {} if family in WIDE else {"hidden_size": 32, "intermediate_size": 32}
    folder, flags = make_family(tmp_path / "model", family, **sizes)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text, other = tokens_of(26, 2), tokens_of(9, 3)
    with torch.inference_mode():
        wanted, beside = (model(torch.tensor([tokens])).logits[0].float() for tokens in (text, other))
    driver = GpuDriver(prepare(flags), num_slots=8)
    one, two = driver.sequences.add(2)
    close(driver.step((one, text[:25]), sample=[5, 24]), wanted[[5, 24]])
    found = driver.step((one, text[25:]), (two, other), sample=range(10))
    close(found, torch.cat((wanted[25:], beside)))


@pytest.mark.parametrize("family", OF_INDEXERS)
def test_indexers_are_refused_by_name(family, tmp_path):
    with pytest.raises(ConfigError, match="no GPU kernel selects tokens by an indexer; use --device cpu"):
        make_family(tmp_path / "model", family)


@pytest.fixture(scope="module")
def prepared(own_cache, tmp_path_factory):
    # One layer: these tests are about the code before and after the layers.
    folder = save_model(tmp_path_factory.mktemp("model") / "model", num_hidden_layers=1)
    return prepare(ModelFlags(model=str(folder), dtype="float32"))


def rows_of(positions, *, logprobs=-1, edits=(), masks=None, **params):
    count = len(positions)
    given = [SamplingParams(**{"temperature": 0.8, **params})] * count
    seeds = [2**40 + number for number in range(count)]
    reports = np.full(count, logprobs, np.int64)
    return SamplingRows.of(given, seeds, positions, logprobs=reports, edits=edits, masks=masks)


@pytest.mark.parametrize(
    "overrides",
    [
        {"temperature": 0.0},
        {},
        {"top_k": 7, "top_p": 0.8},
        {"logprobs": 2, "top_p": 0.9},
        {"logprobs": 3, "edits": (RowEdit(row=1, banned=np.arange(200)),)},
    ],
)
def test_tokens_match_the_host_sampler(prepared, overrides):
    driver = GpuDriver(prepared)
    a, b = driver.sequences.add(2)
    batch = driver.sequences.step([(a, tokens_of(3, 0)), (b, tokens_of(5, 1))])
    rows = rows_of([3, 5], **overrides)
    logits = driver.backend.forward(batch).clone()
    wanted = sample(logits, rows)
    found = driver.backend.launch(batch, (), rows).wait()
    assert found.token_ids == wanted.token_ids
    assert len(found.logprobs) == len(wanted.logprobs)
    for one, other in zip(found.logprobs, wanted.logprobs, strict=True):
        assert (one.token_id, one.top_ids) == (other.token_id, other.top_ids)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize(("temperature", "late"), [(0.0, ()), (0.9, (1,)), (0.0, (0, 1))])
def test_masked_rows_sample_like_the_host(prepared, temperature, late):
    """One row has a grammar and another does not; a late mask leaves its row without a token."""
    driver = GpuDriver(prepared)
    a, b, c = driver.sequences.add(3)
    batch = driver.sequences.step([(a, tokens_of(3, 0)), (b, tokens_of(2, 2)), (c, tokens_of(4, 1))])
    allowed = np.random.default_rng(1).random((2, driver.backend.vocab_size)) < 0.02
    edits = (RowEdit(row=2, banned=np.flatnonzero(allowed[1])), RowEdit(row=0, banned=np.flatnonzero(allowed[0])[:1]))
    masks = GivenMasks(np.array([0, 2]), allowed, late)
    rows = rows_of([3, 2, 4], temperature=temperature, logprobs=2, edits=edits, masks=masks)
    wanted = sample(driver.backend.forward(batch).clone(), rows)
    found = driver.backend.launch(batch, (), rows).wait()
    assert found.token_ids == wanted.token_ids
    assert [token == MASK_LATE for token in found.token_ids] == [0 in late, False, 1 in late]
    for row, place in ((0, 0), (2, 1)):
        if place not in late:
            assert allowed[place, found.token_ids[row]], "a ban of all that is allowed is none"
            assert found.logprobs[row].logprob == pytest.approx(wanted.logprobs[row].logprob, abs=1e-4)
            assert found.logprobs[row].top_ids == wanted.logprobs[row].top_ids


def test_log_probabilities_of_prompts(tmp_path):
    folder, flags = make_model(tmp_path / "model", FAMILIES["qwen3-qk-norm"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = [tokens_of(PROMPT_TOKENS, 2)[:18], tokens_of(PROMPT_TOKENS, 3)[:5]]
    driver = GpuDriver(prepare(flags), num_slots=40)
    for text, found in zip(texts, run_scored(driver.backend, texts, [7]), strict=True):
        with torch.inference_mode():
            check_scores(found, text, model(torch.tensor([text])).logits[0].float())


def test_the_workspace_has_logits_of_scored_prompts(prepared):
    """The scheduler's max scored rows fit beside all sampled ones, so that a step allocates no logits."""
    flags = DecodeFlags(
        model="m",
        max_num_batched_tokens=4096,
        max_num_seqs=8,
        speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=2),
    )
    limits = limits_of(flags, prepared)
    assert (limits.max_samples, limits.max_scored) == (24, scored_rows(prepared.vocab_size))
    assert limits_of(replace(flags, max_num_batched_tokens=30), prepared).max_scored == 6
    assert limits_of(PrefillFlags(model="m", max_num_batched_prefill_tokens=9), prepared).max_scored == 9


@pytest.mark.parametrize("family", ["llama-gqa-tied", "qwen3-moe"])
def test_step_bytes_are_the_buffers_of_a_large_step(family, tmp_path):
    """All buffers of a model and its experts for steps of 65,536 tokens, except weights and rotary tables."""
    _, flags = make_model(tmp_path / "model", FAMILIES[family])
    prepared, tokens = prepare(flags), 65_536
    backend = gpu_backend(prepared)
    small, config = backend._model, load_config(prepared.folder)
    model = GpuModel(small.weights, prepared.max_model_len, tokens, 256, max_samples=MAX_SEQS)
    owned = list(vars(model).values())
    if model.has_experts:
        experts = GpuExperts(model)
        owned += [getattr(experts._buffers, each.name) for each in fields(experts._buffers)]
        owned += [*vars(experts._route).values(), *vars(experts._sort).values()]
    kept = [value.untyped_storage() for value in owned if isinstance(value, torch.Tensor)]
    taken = sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values())
    told = step_bytes(config, prepared.dtype, tokens, MAX_SEQS, mixed_rows=MAX_MIXED_ROWS)
    assert told / 4 < taken <= told


def test_the_step_that_compiles_needs_few_slots():
    for batch in warm_up_batches(65_536, 16, SCRATCH_SLOTS):
        assert batch.block_tables.max() < SCRATCH_SLOTS
    assert next(warm_up_batches(65_536, 16)).block_tables.max() == 4095


def test_a_step_embeds_tokens_that_only_the_device_knows(prepared):
    """Steps launched ahead, whose token ids are row numbers, sample the same as steps in sequence."""

    def answers(ahead: bool) -> list[tuple[int, ...]]:
        driver = GpuDriver(prepared)
        a, b = driver.sequences.add(2)
        in_flight = driver.backend.launch(
            driver.sequences.step([(a, tokens_of(9, 0)), (b, tokens_of(4, 1))]), (), rows_of([9, 4])
        )
        chosen = []
        for step in range(3):
            if not ahead:
                chosen.append(in_flight.wait().token_ids)
            # The sequences change places, so a row is not its own successor.
            one, two = (-2, -1) if ahead else chosen[-1][::-1]
            batch = driver.sequences.step([(b, [one]), (a, [two])])
            following = driver.backend.launch(batch, (), rows_of([5 + step, 10 + step]))
            if ahead:
                chosen.append(in_flight.wait().token_ids)
            in_flight, (a, b) = following, (b, a)
        return [*chosen, in_flight.wait().token_ids]

    assert answers(ahead=True) == answers(ahead=False)


def test_deferred_sampling_equals_sampling_at_launch(prepared):
    """A step's forward pass is launched on tokens known only to the device, its sampling when the host knows them."""

    def answers(late: bool) -> list[tuple[int, ...]]:
        driver = GpuDriver(prepared)
        (one,) = driver.sequences.add()
        chosen: list[tuple[int, ...]] = []

        def rows(position: int) -> SamplingRows:
            banned = np.array([token for (token,) in chosen], np.int64)
            return rows_of([position], edits=(RowEdit(row=0, banned=banned),))

        step = driver.backend.launch(driver.sequences.step([(one, tokens_of(9, 0))]), (), rows(9))
        for position in range(10, 13):
            if not late:
                chosen.append(step.wait().token_ids)
            batch = driver.sequences.step([(one, [-1])])
            following = driver.backend.launch(batch, (), None if late else rows(position))
            if late:
                chosen.append(step.wait().token_ids)
                following.choose(rows(position))
            step = following
        return [*chosen, step.wait().token_ids]

    found = answers(late=True)
    assert found == answers(late=False)
    assert len(set(found)) == 4


def test_plain_rows_are_sampled_within_the_step_and_others_after_it(prepared, monkeypatch):
    """A step with edits or with several samples of one row, and one whose rows come later, run the same graphs, without
    rows to sample."""
    driver = GpuDriver(prepared)
    backend = driver.backend
    launches, choose = [], backend._sampler.choose
    monkeypatch.setattr(backend._sampler, "choose", lambda *each: (launches.append(1), choose(*each)))
    batch = driver.sequences.step([(number, tokens_of(2, number)) for number in driver.sequences.add(2)])
    twice = replace(batch, sample_rows=batch.sample_rows[[0, 1, 1]])
    logits = backend.forward(batch).clone()
    backend._model.sampled.fill_(-7)
    edits = (RowEdit(row=1, banned=np.arange(100)),)
    for one, rows, after in (
        (batch, None, 0),
        (batch, rows_of([2, 2], top_p=0.9), 0),
        (batch, rows_of([2, 2], edits=edits), 1),
        (twice, rows_of([2, 2, 2], temperature=5.0), 1),
    ):
        del launches[:]
        found = backend.launch(one, (), rows).wait().token_ids
        # A graph is captured once, and replays its sampling.
        assert len(launches) == after + (not NATIVE)
        if rows is None:
            assert set(backend._model.sampled.tolist()) == {-7}
        else:
            assert found == sample(logits[[0, 1, 1][: len(rows)]].clone(), rows).token_ids


def test_a_step_without_sampling_can_be_waited_for(prepared):
    driver = GpuDriver(prepared)
    batch = driver.sequences.step([(driver.sequences.add()[0], [1, 2])])
    assert driver.backend.launch(batch, (), None).wait().token_ids == ()


def test_copies_come_before_the_step(prepared):
    driver = GpuDriver(prepared)
    (one,) = driver.sequences.add()
    prompt = tokens_of(18, 4)
    driver.step((one, prompt))
    parallel_sample, sources, targets = driver.sequences.parallel_sample(one)
    assert len(sources) == 1
    batch = driver.sequences.step([(parallel_sample, [5])])
    copied = driver.backend.launch(batch, tuple(zip(sources, targets, strict=True)), rows_of([19])).wait()
    (fresh,) = driver.sequences.add()
    again = driver.backend.launch(driver.sequences.step([(fresh, [*prompt, 5])]), (), rows_of([19])).wait()
    assert copied.token_ids == again.token_ids


def test_float8_is_close_to_exact(prepared):
    text = tokens_of(20, 5)
    exact, rough = GpuDriver(prepared), GpuDriver(prepared, backend=gpu_backend(prepared, fp8=True))
    assert rough.backend.layout.block_bytes < exact.backend.layout.block_bytes / 2
    assert rough.backend.layout.version != exact.backend.layout.version
    found = [driver.run_all(driver.sequences.add()[0], text, [18, 1]) for driver in (exact, rough)]
    error = (found[0] - found[1]).abs().mean() / found[0].abs().mean()
    assert 0 < error < 0.1


def test_a_window_of_max_model_len_is_none(tmp_path):
    _, flags = make_model(tmp_path / "model", {**FAMILIES["llama4"], "num_hidden_layers": 3})
    for longest, windows in ((24, (0,)), (25, (-24, 0))):
        driver = GpuDriver(prepare(replace(flags, max_model_len=longest)), num_slots=8)
        (part,) = driver.backend._bound.parts
        assert part.attention.planner.windows == windows


def test_rows_of_padding_write_nothing(prepared):
    """A step of three tokens runs as four; only the slot in the block table changes."""
    driver = GpuDriver(prepared, num_slots=8)
    (one,) = driver.sequences.add()
    pool = driver.memory.tensor.view(8, -1)
    before = pool.clone()
    batch = driver.sequences.step([(one, [1, 2, 3])])
    driver.backend.forward(batch)
    changed = (pool != before).any(1).nonzero().view(-1).tolist()
    assert changed == [int(batch.block_tables[0, 0])]


def test_misuse_is_refused(prepared):
    backend = gpu_backend(prepared)
    driver = GpuDriver(prepared)
    batch = driver.sequences.step([(driver.sequences.add()[0], [1])])
    with pytest.raises(Internal, match="before bind_pool"):
        backend.forward(batch)
    if NATIVE:
        with pytest.raises(ConfigError, match="host memory"):
            backend.bind_pool(memoryview(bytearray(2**20)), 1)
    many = driver.sequences.step([(number, [1]) for number in driver.sequences.add(MAX_SEQS + 1)])
    with pytest.raises(Internal, match="too large"):
        driver.backend.forward(many)
    with pytest.raises(Internal, match="cannot copy blocks"):
        driver.backend.copy_blocks([0], [64])
    driver.backend.close()
    driver.backend.close()


def test_sizes_of_graphs():
    assert sizes_for(1) == (1,)
    assert sizes_for(6) == (1, 2, 4, 6)
    assert sizes_for(100) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 100)
    assert sizes_for(700)[-3:] == (576, 640, 700)
    assert sizes_for(9000)[-3:] == (7168, 7680, MAX_GRAPH_TOKENS)


def test_the_largest_graph_is_captured_first_and_large_ones_last():
    """If time or memory is short, steps that gain little by a graph have none, and no step is padded to several times
    its tokens."""
    graphs = StepGraphs(lambda shape: torch.empty(0), MAX_GRAPH_TOKENS, 1, torch.device("cuda"), eager=False)
    order = list(dict.fromkeys(shape.tokens for shape in graphs.shapes()))
    assert sorted(order) == list(sizes_for(MAX_GRAPH_TOKENS))
    few, many = order[1 : order.index(1) + 1], order[order.index(1) + 1 :]
    assert (order[0], few, many) == (MAX_GRAPH_TOKENS, sorted(few, reverse=True), sorted(many))
    assert max(few) < min(many)
    graphs._graphs = dict.fromkeys([graphs._shape(MAX_GRAPH_TOKENS, True, False)])
    assert graphs.shape_of(7500, 1, True).tokens == MAX_GRAPH_TOKENS
    assert graphs.shape_of(2049, 1, True).tokens == 2049


@pytest.mark.parametrize(
    ("answers", "kept"), [([True] * 40, 6), ([True, True, True, False], 1), ([True, True, False], 1)]
)
def test_ranks_keep_the_same_graphs(monkeypatch, answers, kept):
    """A graph is kept if every rank can start it and has it; a missing graph or lack of time on one rank ends
    capture."""
    asked = iter(answers)
    graphs = graphs_of_ranks(monkeypatch, lambda fine: fine and next(asked), lambda shape: torch.empty(0))
    monkeypatch.setattr(graphs, "_capture_shape", lambda shape, pool: (None, None))
    graphs.capture(lambda line: None)
    assert list(graphs._graphs) == list(graphs.shapes())[:kept]


def graphs_of_ranks(monkeypatch, agree, run) -> StepGraphs:
    """The graphs of a rank without a GPU, which asks the others by ``agree``."""

    def wait(event):
        raise BackendLost("another rank has ended")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    ranks = SimpleNamespace(agree=agree, no_collectives=contextlib.nullcontext, wait=wait)
    return StepGraphs(run, 4, 4, torch.device("cuda"), eager=False, ranks=ranks)


def test_a_rank_out_of_memory_does_not_break_other_ranks_steps(monkeypatch):
    """It reports after a step alone, and no rank starts a step that it cannot join."""
    said, runs = [], []

    def run(shape):
        runs.append(shape)
        raise torch.OutOfMemoryError

    graphs = graphs_of_ranks(monkeypatch, lambda fine: said.append(fine) or fine, run)
    graphs.capture(lambda line: None)
    assert (len(runs), said) == (1, [False])


def test_a_capture_waits_no_longer_than_ranks_do(monkeypatch):
    """No wait for a device that waits for a dead rank."""
    graphs = graphs_of_ranks(monkeypatch, bool, lambda shape: torch.empty(0))
    monkeypatch.setattr(gpu_graphs, "event_on", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: pytest.fail("a wait without a limit"))
    with pytest.raises(BackendLost, match="another rank has ended"):
        graphs.capture(lambda line: None)
