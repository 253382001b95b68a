"""The reader of GGUF files, against the gguf package."""

from __future__ import annotations

import contextlib
import pathlib
import struct

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.config import ModelFlags
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.quantized.gguf_reader import read_gguf
from pillion.errors import ConfigError
from tests.support.examples import examples

TYPES = gguf.GGUFValueType
NUMBERS = {
    TYPES.UINT8: 200,
    TYPES.INT8: -100,
    TYPES.UINT16: 60_000,
    TYPES.INT16: -30_000,
    TYPES.UINT32: 2**32 - 1,
    TYPES.INT32: -(2**31),
    TYPES.FLOAT32: 0.1,
    TYPES.BOOL: True,
    TYPES.UINT64: 2**64 - 1,
    TYPES.INT64: -(2**63),
    TYPES.FLOAT64: 0.1,
}
# Types that the package reads but does not write.
BLOCK_BYTES = {"Q6_K": 210, "IQ4_NL": 144}
KINDS = ("F64", "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q6_K", "IQ4_NL", "MXFP4")


def write_all_types(path: pathlib.Path, alignment: int = 32) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    for kind, value in NUMBERS.items():
        writer.add_key_value(f"a.{kind.name}", value, kind)
        writer.add_key_value(f"b.{kind.name}", [value] * 3, TYPES.ARRAY, kind)
    writer.add_string("c.text", "é ▁ 日本")
    writer.add_array("c.texts", ["", "a b", "▁日"])
    writer.add_array("c.nested", [["x", ""], ["y"]])
    for number, kind in enumerate(KINDS):
        _add(writer, f"t.{kind}", kind, np.arange(512, dtype=np.float32).reshape(2, 256) / (number + 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, kind: str, numbers: np.ndarray) -> None:
    number = gguf.GGMLQuantizationType[kind]
    if kind in ("F64", "F16"):
        writer.add_tensor(name, numbers.astype({"F64": np.float64, "F16": np.float16}[kind]))
    elif kind in BLOCK_BYTES:
        blocks = (np.arange(2 * BLOCK_BYTES[kind]) % 64).astype(np.uint8).reshape(2, -1)
        writer.add_tensor(name, blocks, raw_dtype=number)
    else:
        writer.add_tensor(name, gguf.quantize(numbers, number), raw_dtype=number)


@pytest.mark.parametrize("alignment", [32, 64])
def test_metadata_and_tensors_match_the_gguf_package(alignment: int, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.gguf"
    write_all_types(path, alignment)
    found, oracle = read_gguf([path]), gguf.GGUFReader(path)
    wanted = {key: field.contents() for key, field in oracle.fields.items() if not key.startswith("GGUF.")}
    assert wanted["c.nested"] != found.metadata["c.nested"]  # The package flattens it.
    assert found.metadata["c.nested"] == [["x", ""], ["y"]]
    for key in wanted.keys() - {"c.nested"}:
        value = found.metadata[key]
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == wanted[key], key
    assert found.metadata.keys() == wanted.keys()
    assert [tensor.name for tensor in found.tensors] == [tensor.name for tensor in oracle.tensors]
    for tensor, theirs in zip(found.tensors, oracle.tensors, strict=True):
        assert tensor.kind == theirs.tensor_type.name
        assert list(tensor.shape) == theirs.shape.tolist()[::-1]
        assert tensor.data.tobytes() == theirs.data.tobytes()
        numbers = theirs.data if tensor.kind == "F64" else gguf.dequantize(theirs.data, theirs.tensor_type)
        np.testing.assert_array_equal(tensor.numbers(), numbers)


def test_damaged_files_raise_one_kind_of_error(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.gguf"
    write_all_types(path)
    whole = path.read_bytes()

    @given(st.integers(0, len(whole) - 1), st.binary(min_size=1, max_size=8), st.booleans())
    @settings(max_examples=examples(400))
    def check(place: int, other: bytes, cut: bool) -> None:
        damaged = tmp_path / "b.gguf"
        damaged.write_bytes(whole[:place] if cut else whole[:place] + other + whole[place + len(other) :])
        # An empty file cannot be mapped, and damaged letters are not UTF-8: ValueErrors.
        with contextlib.suppress(ConfigError, ValueError):
            read_gguf([damaged])

    check()


def write_part(path: pathlib.Path, number: int, count: int) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", count)
    writer.add_tensor(f"t{number}", np.full(32, number, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_parts_are_one_model(tmp_path: pathlib.Path) -> None:
    parts = [tmp_path / f"m-0000{number + 1}-of-00003.gguf" for number in range(3)]
    for number, path in enumerate(parts):
        write_part(path, number, 3)
    found = read_gguf(parts)
    assert {tensor.name: tensor.data[0] for tensor in found.tensors} == {"t0": 0, "t1": 1, "t2": 2}
    with pytest.raises(ConfigError, match="it is part 2 of 3, and 1 were found"):
        read_gguf(parts[1:2])
    with pytest.raises(ConfigError, match="duplicate tensor names"):
        read_gguf([parts[0], parts[0], parts[0]])


def header(entries: int, tensors: int, *values: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + b"".join(values)


def entry(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (
            header(1, 0, entry("a", 9, struct.pack("<IQ", 4, 2**61))),
            "counts 2,305,843,009,213,693,952 items of 4 bytes",
        ),
        (
            header(1, 0, entry("a", 9, struct.pack("<IQ", 8, 2**61))),
            "counts 2,305,843,009,213,693,952 items of 8 bytes",
        ),
        (header(1, 0, entry("a", 8, struct.pack("<Q", 2**40))), "counts 1,099,511,627,776 items of 1 bytes"),
        (header(2**60, 0), "counts 1,152,921,504,606,846,976 items of 12 bytes"),
        (header(0, 2**60), "counts 1,152,921,504,606,846,976 items of 24 bytes"),
        (header(1, 0, entry("a", 9, struct.pack("<IQ", 9, 1) * 9)), "a value of the type 9"),
        (header(1, 1, entry("llama.block_count", 4, struct.pack("<I", 2**31)), b"\0" * 99), "block_count = 2147483648"),
        (
            header(1, 1, entry("llama.expert_count", 4, struct.pack("<I", 2**31)), b"\0" * 99),
            "expert_count = 2147483648",
        ),
    ],
)
def test_counts_of_a_header_fit_into_the_file(written: bytes, said: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(written)
    with pytest.raises(ConfigError, match=said):
        prepare(ModelFlags(model=str(path)))


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "it is in big-endian byte order"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1, which is not known"),
        (header(2, 0, entry("a", 7, b"\1"), entry("a", 7, b"\1")), "its header has 'a' twice"),
        (header(1, 0, entry("general.alignment", 4, struct.pack("<I", 24))), "alignment is 24, which is not a power"),
    ],
)
def test_files_of_another_kind_are_refused(written: bytes, said: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(written)
    with pytest.raises(ConfigError, match=said):
        read_gguf([path])
