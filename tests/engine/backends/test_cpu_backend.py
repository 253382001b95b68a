"""The CPU kernels' backend: bits independent of the batch, and no step outside of its memory."""

from __future__ import annotations

import dataclasses
import shutil
from itertools import product

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lab.testbed.tiny_model import save_model
from pillion.config import ModelFlags
from pillion.engine.checkpoints.prepare import prepare
from pillion.errors import ConfigError, Internal
from pillion.kernels.cpu.runtime.program import Buffer, Program, Workspace
from pillion.kernels.step import StepBatch
from tests.support.batches import Sequences
from tests.support.cpu_model import CpuDriver, cpu_backend, needs_kernels
from tests.support.torch_model import BackendDriver, perturb_vectors

pytestmark = [needs_kernels, pytest.mark.usefixtures("own_cache")]

MODELS = {
    "llama": {},
    "gemma2": {
        "model_type": "gemma2",
        "query_pre_attn_scalar": 24,
        "sliding_window": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 48},
}

DTYPES = ("float32", "bfloat16")
# KV of the model's type, and 8-bit KV of both types with windows and soft caps.
MODELS_AND_KV = [*product(MODELS, DTYPES, ["auto"]), ("gemma2", "bfloat16", "fp8"), ("gemma2", "float32", "int8")]
EACH_MODEL_AND_KV = pytest.mark.parametrize(
    ("folder", "prepared", "kv"), MODELS_AND_KV, indirect=["folder", "prepared"]
)
# Only one model runs long texts, which are slow: 8-bit KV, windows and soft caps.
LONG_TEXTS = pytest.mark.parametrize(
    ("folder", "prepared", "kv"),
    [
        case if case == ("gemma2", "bfloat16", "fp8") else pytest.param(*case, marks=pytest.mark.long)
        for case in MODELS_AND_KV
    ],
    indirect=["folder", "prepared"],
)


@pytest.fixture(scope="module")
def folders(own_cache, tmp_path_factory):
    found = {name: save_model(tmp_path_factory.mktemp("model") / name, **shape) for name, shape in MODELS.items()}
    for folder in found.values():
        perturb_vectors(folder)
    return found


@pytest.fixture(params=MODELS, scope="module")
def folder(request, folders):
    return folders[request.param]


@pytest.fixture(params=DTYPES, scope="module")
def prepared(request, folder):
    return prepare(ModelFlags(model=str(folder), dtype=request.param))


@pytest.fixture(scope="module")
def llama(folders):
    return prepare(ModelFlags(model=str(folders["llama"]), dtype="bfloat16"))


def text_of(count: int, seed: int) -> list[int]:
    return torch.randint(0, 258, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("width", [32, 576, 1536, 2048, 4096, 8192])
@pytest.mark.parametrize("dtype", ["float32", "uint16"])
def test_buffer_rows_use_all_sets_of_the_l1_cache(width, dtype):
    """Rows at distances of a power of two would evict each other from a cache of 64 sets."""
    stride = Buffer("x", width, dtype).stride
    assert 0 <= stride - width * np.dtype(dtype).itemsize <= 64
    assert len({row * stride // 64 % 64 for row in range(64)}) == 64


def test_buffers_of_one_name_have_one_size():
    """Kernels would write beyond the smaller one."""
    workspace, narrow = Workspace(), Buffer("x", 48, "float32")
    workspace.reserve("tokens", 13)
    assert len(workspace.array(narrow)) == len(workspace.array(narrow)) == 64 * narrow.stride
    with pytest.raises(Internal, match="buffer x has 12288 bytes, not 69632"):
        workspace.array(Buffer("x", 256, "float32"))


def test_the_sampler_gets_logits_without_a_copy(llama):
    """It edits them in place, so rows must be contiguous."""
    logits = cpu_backend(llama).model.plan.logits
    assert logits.stride == logits.width * 4


def test_float32_models_keep_weights_that_are_bfloat16(folder, tmp_path, monkeypatch):
    """Matrices and experts without loss in bfloat16 stay bfloat16, with the same logits bit by bit."""
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = {name: tensor.bfloat16().float() for name, tensor in load_file(path).items()}
    name = next(name for name in tensors if "layers.1." in name and "down_proj" in name)
    tensors[name][1, 2] = 1 + 2**-20
    save_file(tensors, path, metadata={"format": "pt"})
    prepared = prepare(ModelFlags(model=str(tmp_path / "model"), dtype="float32"))
    driver, text = CpuDriver(prepared), text_of(40, 3)
    weights = driver.backend.model.weights
    kinds = {name: tensor.dtype for name, tensor in weights.tensors.items() if name.endswith(".data")}
    assert {name for name, dtype in kinds.items() if dtype == torch.float32} == {
        name for name in kinds if name.startswith("layers.1.") and name.endswith("down.data")
    }
    found = driver.run_all(driver.sequences.add()[0], text, [])
    monkeypatch.setattr("pillion.engine.backends.cpu.cpu_weights.exact_kind", lambda weights, kind: kind)
    monkeypatch.setenv("PILLION_CACHE", str(tmp_path / "cache"))
    other = CpuDriver(prepared)
    assert other.backend.model.weights.nbytes > weights.nbytes
    assert torch.equal(other.run_all(other.sequences.add()[0], text, []), found)


@LONG_TEXTS
def test_a_row_has_the_same_bits_in_every_batch_chunk_and_thread_pool(prepared, kv):
    """Logits depend only on their own text, which makes migrated streams exact."""
    text = text_of(600, 1)
    alone = CpuDriver(prepared, num_slots=400, backend=cpu_backend(prepared, kv_cache_dtype=kv))
    wanted = alone.run_all(alone.sequences.add()[0], text, [])
    for threads, checked, chunks in ((2, False, [1] * 40 + [90, 16, 300]), (3, True, [511, 2])):
        backend = cpu_backend(prepared, threads=threads, checked=checked, kv_cache_dtype=kv)
        driver = CpuDriver(prepared, num_slots=400, backend=backend)
        mine, *others = driver.sequences.add(5)
        driver.check_among_others(mine, text, chunks, wanted, others)
        driver.backend.check_integrity()
        driver.backend.close()


@pytest.mark.parametrize("kernels", ["avx512", "avx2"])
def test_other_instruction_sets_agree(llama, kernels):
    """Kernels of older instruction sets than this processor's."""
    try:
        backend = cpu_backend(llama, kernels=kernels)
    except ConfigError as error:
        pytest.skip(error.message)
    text = text_of(90, 3)
    reference, driver = BackendDriver(llama), CpuDriver(llama, backend=backend)
    wanted = reference.run_all(reference.sequences.add()[0], text, [40])
    found = driver.run_all(driver.sequences.add()[0], text, [40])
    assert (found - wanted).abs().mean() < 0.02 * wanted.std()


def test_a_step_writes_only_the_blocks_of_its_batch(prepared):
    driver = CpuDriver(prepared, num_slots=12)
    pool = np.frombuffer(driver.memory, np.uint8).reshape(12, -1)
    batch = driver.sequences.step([(driver.sequences.add()[0], text_of(40, 2))])
    driver.backend.forward(batch)
    mine = set(batch.block_tables[0].tolist())
    assert len(mine) == 3
    for slot in range(12):
        assert (pool[slot] == 0xFF).all() == (slot not in mine)


@EACH_MODEL_AND_KV
@pytest.mark.parametrize("length", [37, 32, 5])
def test_answers_of_one_prompt_share_its_blocks_and_copy_the_last(prepared, length, kv):
    driver = CpuDriver(prepared, backend=cpu_backend(prepared, kv_cache_dtype=kv))
    prompt = [7 * i % 250 for i in range(length)]
    alone, shared = driver.sequences.add(2)
    driver.step((alone, prompt))
    driver.step((shared, prompt))
    parallel_sample, sources, targets = driver.sequences.parallel_sample(shared)
    driver.backend.copy_blocks(sources, targets)
    first = driver.step((alone, [11, 12, 13]))
    driver.step((parallel_sample, [200, 201, 202]))
    assert torch.equal(driver.step((shared, [11, 12, 13])), first)


def test_a_row_sampled_several_times_repeats_its_logits(llama):
    driver = CpuDriver(llama)
    one, two = driver.sequences.add(2)
    once = driver.step((one, [5, 6, 7, 8]), sample=[1, 3])
    several = driver.step((two, [5, 6, 7, 8]), sample=[1, 1, 3, 3, 3])
    assert torch.equal(several, once[[0, 0, 1, 1, 1]])


def test_steps_that_sample_nothing_and_steps_that_grow(llama):
    driver = CpuDriver(llama, num_slots=300)
    reference = BackendDriver(llama, num_slots=300)
    text = text_of(900, 4)
    for drive in (driver, reference):
        (number,) = drive.sequences.add()
        assert drive.step((number, text[:3]), sample=[]).shape == (0, 258)
        assert drive.step((number, text[3:700]), sample=[]).shape == (0, 258)
        drive.last = drive.step((number, text[700:]))
    assert (driver.last - reference.last).abs().max() < 0.05 * reference.last.std()


def test_a_step_after_a_failed_allocation(llama, monkeypatch):
    """After a failed allocation no kernel may use the freed buffers."""
    driver = CpuDriver(llama, num_slots=100)
    (number,) = driver.sequences.add()
    driver.step((number, text_of(20, 1)))
    batch = driver.sequences.step([(number, text_of(300, 2))])
    bind = Program.bind

    def refuse(workspace, buffer):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "array", refuse)
        with pytest.raises(MemoryError):
            driver.backend.forward(batch)
    bound = []
    monkeypatch.setattr(Program, "bind", lambda program: bound.append(True) or bind(program))
    driver.backend.forward(batch)
    driver.backend.forward(batch)
    assert bound == [True]


def broken(batch: StepBatch):
    """Batches with one fault each, and a part of the error."""
    far = np.array([10**6], np.int32)
    yield dataclasses.replace(batch, token_ids=np.concatenate((batch.token_ids[:-1], far))), "vocabulary"
    yield dataclasses.replace(batch, token_ids=batch.token_ids - 1000), "vocabulary"
    yield dataclasses.replace(batch, token_ids=batch.token_ids[:-1]), "lengths"
    yield dataclasses.replace(batch, token_ids=batch.token_ids.astype(np.int64)), "int32"
    yield dataclasses.replace(batch, positions=batch.positions + 1), "positions"
    yield dataclasses.replace(batch, context_lens=batch.context_lens + 100_000), "positions"
    yield dataclasses.replace(batch, context_lens=batch.context_lens - 30), "positions"
    yield dataclasses.replace(batch, rope_rows=batch.positions + 10_000), "rotary tables"
    yield dataclasses.replace(batch, rope_rows=batch.positions - 30), "rotary tables"
    yield dataclasses.replace(batch, query_starts=batch.query_starts + 1), "divide"
    yield dataclasses.replace(batch, query_starts=batch.query_starts[::-1].copy()), "divide"
    yield dataclasses.replace(batch, block_tables=batch.block_tables + 64), "leaves the pool"
    yield dataclasses.replace(batch, block_tables=batch.block_tables - 64), "leaves the pool"
    yield dataclasses.replace(batch, block_tables=batch.block_tables[:, :1].copy()), "longer than its table"
    yield dataclasses.replace(batch, sample_rows=batch.sample_rows + 40), "not of the batch"
    yield dataclasses.replace(batch, sample_rows=batch.sample_rows - 40), "not of the batch"


def test_an_out_of_bounds_batch_is_refused(llama):
    driver = CpuDriver(llama)
    (number,) = driver.sequences.add()
    batch = driver.sequences.step([(number, text_of(20, 5))])
    for wrong, words in broken(batch):
        with pytest.raises(Internal, match=words):
            driver.backend.forward(wrong)
    assert driver.backend.forward(batch).shape == (1, 258)


def test_texts_longer_than_max_model_len_are_refused(own_cache, tmp_path):
    folder = save_model(tmp_path / "model")
    prepared = prepare(ModelFlags(model=str(folder), dtype="float32", max_model_len=48))
    driver = CpuDriver(prepared)
    (number,) = driver.sequences.add()
    driver.step((number, text_of(48, 6)))
    with pytest.raises(Internal, match="longer than"):
        driver.step((number, [1]))


def test_unsuitable_pools_are_refused(llama):
    backend = cpu_backend(llama)
    sequences = Sequences(5, 16)
    with pytest.raises(Internal, match="bind_pool"):
        backend.forward(sequences.step([(sequences.add()[0], [1])]))
    with pytest.raises(ConfigError, match="needs"):
        backend.bind_pool(memoryview(bytearray(100)), 5)
    with pytest.raises(ConfigError, match="writable"):
        backend.bind_pool(memoryview(bytes(5 * backend.layout.block_bytes)), 5)
    with pytest.raises(Internal, match="bind_pool"):
        backend.copy_blocks([0], [1])


@pytest.mark.parametrize(("sources", "targets"), [([1], []), ([0], [64]), ([-1], [3])])
def test_bad_copies_are_refused_before_anything_is_copied(llama, sources, targets):
    with pytest.raises(Internal, match="cannot copy blocks"):
        CpuDriver(llama).backend.copy_blocks(sources, targets)


def test_int8_weights_are_close(llama):
    text = text_of(120, 7)
    exact = CpuDriver(llama)
    rounded = CpuDriver(prepare(ModelFlags(model=str(llama.folder), dtype="bfloat16", quantization="int8")))
    wanted = exact.run_all(exact.sequences.add()[0], text, [50])
    found = rounded.run_all(rounded.sequences.add()[0], text, [50])
    assert not torch.equal(found, wanted)
    assert (found - wanted).abs().mean() < 0.05 * wanted.std()


@pytest.mark.parametrize("kernels", ["avx512_bf16", "avx512", "avx2"])
def test_kv_in_8_bits_is_close(llama, kernels):
    """On each instruction set, in at most half the bytes; other layouts share no blocks (I2)."""
    text, plain = text_of(120, 7), CpuDriver(llama)
    wanted = plain.run_all(plain.sequences.add()[0], text, [50])
    layouts = {(plain.backend.layout.version, plain.backend.layout.dtype)}
    for kv, most in (("fp8", 0.05), ("int8", 0.02)):
        try:
            driver = CpuDriver(llama, backend=cpu_backend(llama, kernels=kernels, kv_cache_dtype=kv))
        except ConfigError as error:
            pytest.skip(error.message)
        found, layout = driver.run_all(driver.sequences.add()[0], text, [50]), driver.backend.layout
        assert not torch.equal(found, wanted)
        assert (found - wanted).abs().mean() < most * wanted.std()
        assert layout.block_bytes * 2 == plain.backend.layout.block_bytes * (layout.head_dim + 4) // layout.head_dim
        layouts.add((layout.version, layout.dtype))
    assert len(layouts) == 3


def test_a_write_past_a_buffer_is_detected(llama, monkeypatch):
    arrays, array = {}, Workspace.array

    def recorded(workspace, buffer):
        arrays[buffer.name] = array(workspace, buffer)
        return arrays[buffer.name]

    monkeypatch.setattr(Workspace, "array", recorded)
    driver = CpuDriver(llama, backend=cpu_backend(llama, checked=True))
    (number,) = driver.sequences.add()
    driver.step((number, [1, 2, 3]))
    hidden = arrays["tokens.hidden"]
    whole = hidden.base
    whole[hidden.ctypes.data - whole.ctypes.data + hidden.nbytes] = 0
    with pytest.raises(Internal, match="after the end"):
        driver.step((number, [4]))
