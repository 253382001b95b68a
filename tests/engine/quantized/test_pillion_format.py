"""Pillion's own layout of quantized matrices: round trips and rejected mismatches."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from pillion.engine.checkpoints.model_files import weight_files
from pillion.engine.checkpoints.weight_format import TensorHeader
from pillion.engine.quantized.formats.pillion_format import PillionFormat, stored_tensors
from pillion.engine.quantized.shards import write_shards
from pillion.errors import ConfigError
from pillion.kernels.torch.quantized_matrix import QuantizedMatrix

NAMES = {torch.uint8: "U8", torch.int8: "I8", torch.float32: "F32", torch.float16: "F16"}


def matrix(coding: str, rows: int = 6, columns: int = 10, groups: int = 2) -> QuantizedMatrix:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256 if coding == "int8" else 16, (rows, columns), generator=generator, dtype=torch.uint8)
    scales, offsets = torch.randn(2, rows, groups, generator=generator)
    return QuantizedMatrix(coding, codes, scales, columns // groups, offsets if coding == "uint4" else None)


def headers(tensors: dict[str, torch.Tensor]) -> dict[str, TensorHeader]:
    return {name: TensorHeader(NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}


def checked(tensors: dict[str, torch.Tensor]) -> None:
    one = PillionFormat()
    one.stored("a.weight", (6, 10), headers(tensors))
    one.read("a.weight", (6, 10), tensors.__getitem__)


@pytest.mark.parametrize("coding", ["int4", "uint4", "int8", "fp4_e2m1"])
@pytest.mark.parametrize(("columns", "groups"), [(10, 2), (7, 1), (64, 2)])
def test_matrices_round_trip(coding, columns, groups):
    wanted, one = matrix(coding, 6, columns, groups), PillionFormat()
    tensors = stored_tensors("a.weight", wanted)
    assert one.stored("a.weight", (6, columns), headers(tensors)) == tuple(tensors)
    found = one.read("a.weight", (6, columns), tensors.__getitem__)
    assert (found.coding, found.group) == (coding, wanted.group)
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.dequantize(torch.float32), wanted.dequantize(torch.float32))
    assert one.stored("b.weight", (6, columns), headers(tensors)) == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a.codes": torch.zeros(6, 4, dtype=torch.uint8)}, r"a.codes is U8 \[6, 4\], which does not fit \[6, 10\]"),
        ({"a.codes": torch.zeros(6, 10)}, "a.codes is F32"),
        ({"a.scales": torch.zeros(6, 3)}, r"a.scales is F32 \[6, 3\], which does not fit \[6, 10\]"),
        ({"a.scales": torch.zeros(6, 0)}, "a.scales is F32"),
        ({"a.scales": torch.zeros(())}, "a.scales is F32"),
        ({"a.scales": torch.zeros(6, 2).half()}, "a.scales is F16"),
        ({"a.offsets": torch.zeros(6, 5)}, "a.offsets is F32"),
        ({"a.scales": None}, "a.scales is missing beside a.codes"),
        ({"a.codes": None, "a.fp4": torch.zeros(6, 4, dtype=torch.uint8)}, r"a.fp4 is U8 .* does not fit \[6, 10\]"),
        ({"a.scales": torch.full((6, 2), torch.nan)}, "a.scales contains NaN"),
        ({"a.offsets": torch.full((6, 2), torch.inf)}, "a.offsets contains NaN or infinit"),
    ],
)
def test_mismatched_tensors_are_refused_by_name(change, words):
    tensors = stored_tensors("a.weight", matrix("uint4")) | change
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(ConfigError, match=words):
        checked(tensors)


def test_files_are_of_bounded_size(tmp_path):
    wanted = {f"t{index}": torch.full((100,), float(index)) for index in range(5)}
    with write_shards(tmp_path, max_shard_bytes=900) as writer:
        for name, tensor in wanted.items():
            writer.add({name: tensor})
    files = weight_files(tmp_path)
    assert len(files) == 3
    found = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    (tmp_path / "one").mkdir()
    with write_shards(tmp_path / "one") as writer:
        writer.add(wanted)
    assert [path.name for path in weight_files(tmp_path / "one")] == ["model.safetensors"]
