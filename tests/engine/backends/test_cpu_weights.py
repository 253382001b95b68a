"""Packed weights are made once, mapped by all workers and rejected if damaged; and the choice of a backend."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab.testbed.tiny_model import save_model
from pillion.config import ComputeFlags, DecodeFlags, ModelFlags, PrepareFlags
from pillion.engine.backends.cpu.cpu_loading import choose_kernels
from pillion.engine.backends.cpu.cpu_weights import CpuWeights, load_cpu_weights
from pillion.engine.checkpoints.model_cache import ModelCache
from pillion.engine.checkpoints.packed_file import PackedFile, write_packed
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.load_model import is_ready, load_model, make_ready
from pillion.engine.models.config_parser import load_config
from pillion.errors import ConfigError
from pillion.host.cores import parse_cores
from tests.support.cpu_model import needs_kernels
from tests.support.own_cache import model_cache

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.arange(5000, dtype=torch.int32).to(torch.int8),
    "c": torch.randn(7).bfloat16(),
}


@pytest.fixture(autouse=True)
def own_models(tmp_path, monkeypatch):
    """Return a model cache with only the compiled kernels of all tests."""
    monkeypatch.setenv("PILLION_CACHE", model_cache(tmp_path / "cache"))


@pytest.fixture
def path(tmp_path):
    with write_packed(tmp_path / "x.weights") as writer:
        for name, tensor in TENSORS.items():
            writer.tensor(name, tensor)
        writer.number("n", 7)
    return tmp_path / "x.weights"


def test_packed_weights_round_trip(path):
    file = PackedFile(path)
    for name, tensor in TENSORS.items():
        assert torch.equal(file.tensors[name], tensor)
        assert file.tensors[name].data_ptr() % 4096 == 0
    assert file.numbers == {"n": 7}
    assert "d" not in file.tensors


@pytest.mark.parametrize("damage", ["nothing", "empty", "short", "long", "magic", "header", "offset"])
def test_damaged_files_are_refused(path, damage):
    content = path.read_bytes()
    if damage == "nothing":
        content = b""
    elif damage == "empty":
        content = b"\0"
    elif damage == "short":
        content = content[:-1]
    elif damage == "long":
        content += b"\0"
    elif damage == "magic":
        content = b"X" + content[1:]
    elif damage == "header":
        content = content[:20] + b"\xff" + content[21:]
    else:
        content = content.replace(b'"float32", [3, 4], 1048576', b'"float32", [3, 4], 9948576')
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be used"):
        PackedFile(path)


def write_twice(path):
    with write_packed(path) as writer:
        writer.tensor("a", TENSORS["a"])
        writer.tensor("a", TENSORS["a"])


def test_a_packer_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(ConfigError, match="twice"):
        write_twice(tmp_path / "y.weights")
    assert not list(tmp_path.glob("y*"))


def test_weights_are_packed_once(tmp_path):
    prepared = prepare(ModelFlags(model=str(save_model(tmp_path / "model")), dtype="bfloat16"))
    config, lines = load_config(prepared.folder), []
    first = load_cpu_weights(prepared, config, lines.append)
    again = load_cpu_weights(prepared, config, lines.append)
    quantized = prepare(ModelFlags(model=str(tmp_path / "model"), dtype="bfloat16", quantization="int8"))
    other = load_cpu_weights(quantized, load_config(quantized.folder), lines.append)
    assert lines == ["packing weights for the CPU kernels"] * 2
    assert torch.equal(first.linear("lm_head").data, again.linear("lm_head").data)
    assert other.linear("lm_head").data.dtype == torch.uint8
    assert len(list(ModelCache().make("packed").iterdir())) == 2
    packed = ModelCache().packed_weights(prepared.fingerprint, "cpu")
    others = packed.parent
    for name in ("abc-cpu-0.weights", "abc-gpu_float16-1.weights", "abc-cpu-9.weights.tmp", "abc-cpu-999.weights"):
        (others / name).write_bytes(b"other")
    packed.unlink()
    load_cpu_weights(prepared, config, lines.append)
    assert packed.exists()
    assert {path.name for path in others.glob("abc*")} == {"abc-cpu-999.weights"}
    assert len(list(others.iterdir())) == 3


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="not Linux")
def test_two_processes_share_the_pages(path):
    """Mapped pages are the file's: clean and shared, not private."""
    program = f"""
from pathlib import Path
from pillion.engine.checkpoints.packed_file import PackedFile
file = PackedFile(Path({str(path)!r}))
total = sum(float(file.tensors[name].float().sum()) for name in "abc")
lines = Path("/proc/self/smaps").read_text().splitlines()
at = next(i for i, line in enumerate(lines) if line.endswith("x.weights"))
fields = dict(line.split(":") for line in lines[at + 1 : at + 20] if ":" in line)
print(fields["Private_Dirty"].split()[0], fields["Rss"].split()[0])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    dirty, resident = map(int, done.stdout.split())
    assert dirty == 0
    assert resident > 0


@needs_kernels
def test_a_worker_logs_its_backend(tmp_path, caplog):
    caplog.set_level(logging.INFO, "pillion.worker")
    folder = save_model(tmp_path / "model")
    loaded = load_model(DecodeFlags(model=str(folder), dtype="float32"), 2)
    assert loaded.operators.startswith("cpu/")
    assert "all operators run on the CPU kernels" in caplog.text
    assert "2 threads" in caplog.text
    assert "MiB, shared" in caplog.text
    loaded.backend.close()


@pytest.mark.parametrize(
    ("overrides", "flags", "why"),
    [
        ({}, {"cpu_kernels": "torch"}, "--cpu-kernels torch"),
        ({"head_dim": 24}, {}, "heads of a multiple of 16"),
        ({}, {"block_size": 8}, "blocks of a multiple of 16"),
    ],
)
def test_unsupported_models_run_on_torch_with_a_log(tmp_path, caplog, overrides, flags, why):
    caplog.set_level(logging.INFO, "pillion.worker")
    folder = save_model(tmp_path / "model", **overrides)
    loaded = load_model(DecodeFlags(model=str(folder), dtype="float32", **flags), 1)
    assert loaded.operators == "torch"
    assert "all operators run on torch" in caplog.text
    # A processor without kernels is a separate reason.
    assert why in caplog.text or "no kernels for this processor" in caplog.text
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8 needs .*the CPU kernels"):
        load_model(DecodeFlags(model=str(folder), dtype="float32", kv_cache_dtype="fp8", **flags), 1)


def test_a_simulated_processor_without_kernels_takes_torch(tmp_path, monkeypatch):
    monkeypatch.setattr("pillion.engine.backends.cpu.cpu_loading.host_features", frozenset)
    prepared = prepare(ModelFlags(model=str(save_model(tmp_path / "model")), dtype="float32"))
    assert choose_kernels(ComputeFlags(), prepared) == (None, "there are no kernels for this processor")


@needs_kernels
def test_weights_can_be_packed_before_the_first_worker(tmp_path, monkeypatch):
    monkeypatch.setenv("PILLION_CACHE", str(tmp_path / "without-kernels"))
    folder, lines = save_model(tmp_path / "model"), []
    flags = PrepareFlags(model=str(folder), dtype="bfloat16")
    assert not is_ready(flags)
    prepared = make_ready(flags, lines.append)
    assert any("compiling CPU kernels" in line for line in lines)
    lines.clear()
    assert is_ready(flags)
    assert not is_ready(replace(flags, tensor_parallel_size=2))
    assert not is_ready(replace(flags, dtype="float32"))
    make_ready(replace(flags, tensor_parallel_size=2), lines.append)
    assert [line for line in lines if "packing" in line] == [
        f"packing weights for the CPU kernels (rank {rank} of 2)" for rank in range(2)
    ]
    for size in (1, 2):
        lines.clear()
        assert is_ready(replace(flags, tensor_parallel_size=size))
        make_ready(replace(flags, tensor_parallel_size=size), lines.append)
        assert not any("compiling" in line or "packing" in line for line in lines)
    # With adapters, neither the first worker nor its first step compiles.
    make_ready(replace(flags, enable_lora=True), lines.append)
    assert any("compiling CPU kernels" in line for line in lines)
    lines.clear()
    make_ready(replace(flags, enable_lora=True), lines.append)
    assert not any("compiling" in line for line in lines)
    ModelCache().packed_weights(prepared.fingerprint, "cpu1of2").unlink()
    assert not is_ready(replace(flags, tensor_parallel_size=2))
    assert is_ready(flags)
    (folder / "config.json").touch()
    assert not is_ready(flags)


@needs_kernels
def test_different_backends_do_not_share_blocks(tmp_path):
    """Backends with another pool layout or weights have other namespaces (I2)."""
    folder = str(save_model(tmp_path / "model"))
    kinds = [{"cpu_kernels": "torch"}, {}, {"quantization": "int8"}, {"quantization": "int4"}]
    kinds += [{"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "int8", "quantization": "int8"}]
    loaded = [load_model(DecodeFlags(model=folder, dtype="bfloat16", **kind), 1) for kind in kinds]
    assert len({each.namespace() for each in loaded}) == len(kinds)


@pytest.mark.parametrize("name", ["lm_head", "layers.0.o", "layers.1.gate_up"])
@pytest.mark.parametrize("number", ["pairs", "depth", "num_matrices", "matrix_bytes"])
def test_sizes_that_contradict_the_weights_are_refused(tmp_path, name, number):
    """Kernels trust these sizes and would leave their memory."""
    prepared = prepare(ModelFlags(model=str(save_model(tmp_path / "model")), dtype="float32"))
    load_cpu_weights(prepared, load_config(prepared.folder), lambda line: None)
    weights = CpuWeights(ModelCache().packed_weights(prepared.fingerprint, "cpu"))
    weights.linear(name)
    for wrong in (0, -1, 100_000):
        weights.numbers[f"{name}.{number}"] = wrong
        with pytest.raises(ConfigError, match="are inconsistent"):
            weights.linear(name)


def test_files_that_others_could_have_written_are_refused(path):
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o620)
    with pytest.raises(ConfigError, match="other users could have written it"):
        PackedFile(path)


def test_a_server_without_llvm_runs_on_torch(tmp_path):
    """llvmlite does not exist for every system, so torch's backend must not import it."""
    folder = str(save_model(tmp_path / "model"))
    program = f"""
import sys
sys.modules["llvmlite"] = sys.modules["llvmlite.binding"] = None
from pillion.engine.load_model import load_model, make_ready
from pillion.config import DecodeFlags
flags = DecodeFlags(model={folder!r}, dtype="float32")
make_ready(flags, print)
print(load_model(flags, 1).operators)
print({{"transformers", "triton", "tokenizers", "starlette", "huggingface_hub"}} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["torch", "set()"]


def test_lists_of_cores():
    assert parse_cores("") == ()
    assert parse_cores("0") == (0,)
    assert parse_cores(" 0, 0-0") == (0, 0)
    for text in ("x", "²", "1-", "-1", "3-1", "0-5000", "1,,x"):
        with pytest.raises(ConfigError, match="--cpu-affinity"):
            parse_cores(text)
    with pytest.raises(ConfigError, match="may not use core"):
        parse_cores("999")
