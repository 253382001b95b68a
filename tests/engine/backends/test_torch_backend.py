"""The torch backend except its forward pass: copies of blocks, sampled rows, misuse."""

from __future__ import annotations

import pytest
import torch

from lab.testbed.tiny_model import save_model
from pillion.config import DecodeFlags, ModelFlags
from pillion.engine.adapters.adapter_weights import AdapterWeights, LowRank
from pillion.engine.backends import torch_backend
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.load_model import TORCH_BFLOAT16, load_model
from pillion.engine.sampling.sampler import sample
from pillion.errors import ConfigError, Internal
from tests.support.sampling import RowParameters, rows_of
from tests.support.torch_model import BackendDriver


@pytest.fixture(params=["float32", "bfloat16"])
def driver(request, tmp_path, monkeypatch):
    monkeypatch.setenv("PILLION_CACHE", str(tmp_path / "cache"))
    folder = save_model(tmp_path / "model")
    return BackendDriver(prepare(ModelFlags(model=str(folder), dtype=request.param)))


@pytest.mark.parametrize("length", [37, 32, 5])
def test_answers_of_one_prompt_share_its_blocks_and_copy_the_last(driver, length):
    """Two answers over shared blocks have the same logits as over separate ones."""
    prompt = [7 * i % 250 for i in range(length)]
    alone, shared = driver.sequences.add(2)
    driver.step((alone, prompt))
    driver.step((shared, prompt))
    parallel_sample, sources, targets = driver.sequences.parallel_sample(shared)
    assert len(sources) == (1 if length % 16 else 0)
    driver.backend.copy_blocks(sources, targets)
    first = driver.step((alone, [11, 12, 13]))
    # The parallel sample writes other tokens into its copy; the original must not see them.
    driver.step((parallel_sample, [200, 201, 202]))
    assert torch.equal(driver.step((shared, [11, 12, 13])), first)
    other = driver.sequences.add()[0]
    driver.step((other, prompt))
    driver.step((other, [200, 201, 202]))
    assert torch.equal(driver.step((parallel_sample, [3])), driver.step((other, [3])))


def test_a_replay_recomputes_kv_as_precisely_as_promised(driver):
    """KV written token by token is rewritten as a chunk (I6): the same tokens in float32, close logits in bfloat16,
    where torch's products depend on the number of rows."""
    text = [7 * i % 250 for i in range(60)]
    alone, again = driver.sequences.add(2)
    driver.step((alone, text[:40]), sample=[])
    one_by_one = torch.cat([driver.step((alone, [token])) for token in text[40:]])
    at_once = driver.step((again, text), sample=range(40, 60))
    exact = driver.backend.layout.dtype == "float32"
    assert (one_by_one - at_once).abs().max() < (1e-5 if exact else 0.1) * one_by_one.std()
    rows = rows_of([RowParameters(seed=seed, position=41 + seed) for seed in range(20)])
    if exact:
        assert sample(one_by_one, rows) == sample(at_once, rows)


def test_the_start_warns_about_bfloat16_on_torch(driver, caplog):
    prepared = driver.prepared
    flags = DecodeFlags(model=str(prepared.folder), dtype=prepared.dtype, cpu_kernels="torch", component_id="decode-0")
    load_model(flags, 1)
    assert (TORCH_BFLOAT16 in caplog.text) == (prepared.dtype == "bfloat16")


def test_a_row_that_is_sampled_several_times_is_computed_once(driver, monkeypatch):
    (number,) = driver.sequences.add()
    computed, run = [], torch_backend.run_decoder
    once = driver.step((number, [5, 6, 7, 8]), sample=[1, 3])

    def counted(*args, **options):
        # The last argument without a name is the rows whose logits are computed.
        computed.append(len(args[-1]))
        return run(*args, **options)

    monkeypatch.setattr(torch_backend, "run_decoder", counted)
    (again,) = driver.sequences.add()
    several = driver.step((again, [5, 6, 7, 8]), sample=[1, 1, 3, 3, 3])
    assert computed == [2]
    assert torch.equal(several, once[[0, 0, 1, 1, 1]])


def test_many_blocks_are_copied_pair_by_pair(driver):
    """A target may be the source of a later pair."""
    pool = torch.frombuffer(driver.memory, dtype=torch.uint8).view(64, -1)
    pool.zero_()
    for slot in range(5):
        pool[slot] = slot
    driver.backend.copy_blocks([1, 2, 4], [2, 3, 0])
    assert [pool[slot].unique().tolist() for slot in range(5)] == [[4], [1], [1], [1], [4]]


@pytest.mark.parametrize(("sources", "targets"), [([1], []), ([0], [64]), ([-1], [3])])
def test_bad_copies_are_refused_before_anything_is_copied(driver, sources, targets):
    with pytest.raises(Internal, match="cannot copy blocks"):
        driver.backend.copy_blocks(sources, targets)


def test_a_copy_needs_a_pool(driver):
    driver.backend.close()
    with pytest.raises(Internal, match="bind_pool"):
        driver.backend.copy_blocks([0], [1])


@pytest.mark.parametrize(
    ("rank", "name", "first", "shape", "refused"),
    [
        (4, "layers.0.o", 0, (64, 64), ""),
        (9, "layers.0.o", 0, (64, 64), "has rank 9; --max-lora-rank is 8"),
        (4, "layers.9.o", 0, (64, 64), "changes layers.9.o, which this model does not have"),
        (4, "layers.0.o", 1, (64, 64), "does not fit layers.0.o"),
        (4, "layers.0.o", 0, (64, 65), "does not fit layers.0.o"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_by_name(driver, rank, name, first, shape, refused):
    backend, (outputs, inputs) = driver.backend, shape
    assert backend.adapters is None
    backend.bind_adapters(2, 8)
    assert backend.adapters.max_adapters == 2
    pair = LowRank(first, torch.ones(rank, inputs), torch.ones(outputs, rank))
    weights = AdapterWeights("ab" * 32, rank, {name: (pair,)})
    if refused:
        with pytest.raises(ConfigError, match=refused):
            backend.adapters.pack(weights)
        return
    packed = backend.adapters.pack(weights)
    backend.adapters.place(1, packed)
    with pytest.raises(Internal, match="adapter slot 2 is out of range: there are 2"):
        backend.adapters.place(2, packed)
