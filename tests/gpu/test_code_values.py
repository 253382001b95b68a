"""The instructions that make weights of codes, run one by one in Python: no interpreter of Triton's runs them."""

from __future__ import annotations

import itertools
import re
import struct
from functools import partial

import pytest
import torch

from pillion.kernels.gpu.products.code_values import _assembly, _nf4_lookup, _nf4_table
from pillion.kernels.gpu.products.gpu_packing import COLUMNS, ZERO_BASE, PackedKind, _join_bits, _pack_columns, pack
from pillion.kernels.gpu.products.packed_tiles import _byte_of
from pillion.kernels.torch.quantized_matrix import CODINGS, QuantizedMatrix

# Coding, scale, and whether whole numbers are subtracted from codes.
KINDS = [
    ("int4", "float32", False),
    ("uint4", "float32", True),
    ("int8", "float32", False),
    ("fp8_e4m3", "float32", False),
    ("fp4_e2m1", "e8m0", False),
    ("fp4_e2m1", "e5m3", False),
    ("int4", "bfloat16", False),
    ("uint4", "bfloat16", False),
    ("int8", "bfloat16", False),
    ("uint4", "bfloat16", True),
    ("int4", "float16", False),
    ("uint4", "float16", False),
    ("uint4", "float16", True),
]


def halves(number: int) -> torch.Tensor:
    """The two bfloat16 of a register, as float64."""
    return torch.tensor([number & 0xFFFF, number >> 16]).to(torch.uint16).view(torch.bfloat16).double()


def register(values: torch.Tensor) -> int:
    """The register that holds two bfloat16."""
    low, high = (int(each) & 0xFFFF for each in values.bfloat16().view(torch.int16))
    return low | high << 16


def permuted(left: int, right: int, selector: int) -> int:
    octets = (left | right << 32).to_bytes(8, "little")
    chosen = [(octets[selector >> 4 * at & 7], selector >> 4 * at & 8) for at in range(4)]
    # With its highest bit a place of the selector repeats the highest bit of the byte.
    return int.from_bytes(bytes((octet >> 7) * 255 if sign else octet for octet, sign in chosen), "little")


def looked_up(a: int, b: int, c: int, table: int) -> int:
    return sum((table >> (4 * (a >> at & 1) + 2 * (b >> at & 1) + (c >> at & 1)) & 1) << at for at in range(32))


def packed_floats(dtype: torch.dtype, upper: float, lower: float) -> int:
    """The register that holds two float32, rounded to a type of 16 bits."""
    low, high = (int(each) & 0xFFFF for each in torch.tensor([lower, upper]).to(dtype).view(torch.int16))
    return low | high << 16


def number_of(word: str) -> float | int:
    """The number that an instruction names."""
    return struct.unpack(">f", bytes.fromhex(word[2:]))[0] if word.startswith("0f") else int(word)


def results_of(assembly: str, operands: dict[str, float]) -> dict[str, float]:
    """Run instructions over registers of 32 bits, whose numbers are words or float32; returns all of them."""
    known = dict(operands)
    run = {
        "mul.rn.f32": lambda a, b: torch.tensor(a).mul(torch.tensor(b)).item(),
        "mov.f32": lambda a: a,
        "neg.f32": lambda a: -a,
        "cvt.rn.bf16x2.f32": partial(packed_floats, torch.bfloat16),
        "cvt.rn.f16x2.f32": partial(packed_floats, torch.float16),
        "prmt.b32": permuted,
        "lop3.b32": looked_up,
        "shl.b32": lambda a, by: a << by & 0xFFFFFFFF,
        "shr.b32": lambda a, by: a >> by,
        "and.b32": lambda a, b: a & b,
        "mov.b32": lambda low, high=0: low | high << 16,
        "fma.rn.bf16x2": lambda a, b, c: register(halves(a) * halves(b) + halves(c)),
    }
    for line in assembly.strip("{} ").split(";"):
        if line.strip() and ".reg" not in line:
            name, target, *values = re.findall(r"[\w$.]+", line)
            if "{" in line and "}," in line:  # A register is taken apart.
                upper, values = values[0], values[1:]
                known[target], known[upper] = known[values[0]] & 0xFFFF, known[values[0]] >> 16
            else:
                known[target] = run[name](*(known[word] if word in known else number_of(word) for word in values))
    return known


def result_of(assembly: str, *operands: int) -> int:
    """Run instructions over words, $1 and the next ones; returns $0."""
    return results_of(assembly, {f"${number}": value for number, value in enumerate(operands, 1)})["$0"]


def scales_of(kind: str, subtracted: torch.Tensor | None) -> tuple[list[int], list[torch.Tensor]]:
    """The words of scales for two outputs, and what all scales in them stand for."""
    if kind in ("bfloat16", "float16"):
        scales = torch.randn(2, 2).to(getattr(torch, kind)).float()
        offsets = None if subtracted is None else -scales * subtracted[:, None].float()
        packed = pack(
            QuantizedMatrix("uint4", torch.zeros(2, 64, dtype=torch.uint8), scales, 32, offsets), torch.bfloat16
        )
        assert packed.kind.scale == kind
        return packed.scales[0, 0, :2].tolist(), list(scales.double().T[: packed.kind.per_scale_word])
    numbers = torch.randint(120, 250, (4,)).int()
    if kind == "e8m0":
        factors = torch.exp2(numbers.double() - 253)
    else:
        factors = (1 + numbers % 8 / 8).double() * torch.exp2((numbers // 8).double() - 29)
    return [int(_join_bits(list(numbers), 8))] * 2, list(factors)


@pytest.mark.parametrize(("coding", "scale", "zeros"), KINDS)
def test_instructions_make_the_weights_of_codes(coding, scale, zeros):
    shift = "zeros" if zeros else "none"
    kind = PackedKind(coding, 64, 512, 32, scale, shift)
    known = (~CODINGS[coding].isnan()).nonzero().flatten()
    for _ in range(8):
        codes = known[torch.randint(len(known), (kind.per_word, 2))].int()
        stored = codes ^ 0x80 if coding == "int8" else codes
        words = [int(word) & 0xFFFFFFFF for word in _pack_columns(list(stored), kind)]
        subtracted = torch.randint(16, (2,)).double() * zeros
        more, factors = [register(-ZERO_BASE - subtracted)], [torch.ones(2)]
        if scale != "float32":
            more, factors = scales_of(scale, subtracted if zeros else None)
        operands = [*words, *(word & 0xFFFFFFFF for word in more)]
        for place, at in itertools.product(range(kind.per_word), range(len(factors))):
            wanted = (CODINGS[coding][codes[place].long()].double() - subtracted) * factors[at]
            found = result_of(_assembly(coding, place, shift, scale, _byte_of(at, 0, 32, len(factors))), *operands)
            assert torch.equal(halves(found), wanted.bfloat16().double()), (place, at)


@pytest.mark.parametrize("offsets", [True, False])
@pytest.mark.parametrize("coding", ["uint4", "int4", "int8"])
def test_instructions_make_weights_of_signed_numbers(coding, offsets):
    """They are as near to value * scale + offset as the docstring of the packing says."""
    scales = torch.randn(2, 16) * torch.tensor([[1.0], [0.003]])
    rest = scales * torch.rand(2, 16) * -15 if offsets else None
    codes = torch.randint(16, (2, 512)).to(torch.uint8)
    if coding == "int8":
        # Less a middle of at most 15, these are numbers of int8.
        codes = torch.randint(-112 if offsets else -127, 128, (2, 512)).to(torch.int8).view(torch.uint8)
    matrix = QuantizedMatrix(coding, codes, scales, 32, rest)
    packed = pack(matrix, torch.bfloat16)
    kind = packed.kind
    assert (kind.scale, kind.shift) == ("two_halves", "offsets" if offsets or coding != "int8" else "none")
    wanted, factors = matrix.dequantize(torch.float64), packed.factors[:2].double()
    # What remains of an offset is at most half a scale in 8 bits; in 4 bits it is the rest beside the middle code.
    left = scales.abs() / 2
    if coding != "int8":
        left = ((rest if offsets else 0) + scales * (7.5 if coding == "uint4" else -0.5)).abs()
    sizes = (scales.abs() * (128 if coding == "int8" else 8) * 2.0**-16 + left * 2.0**-7).repeat_interleave(32, 1)
    allowed = wanted.abs() * 2.0**-8 + sizes
    words = packed.words.view(kind.units, 64, COLUMNS)[:, :2].long() & 0xFFFFFFFF
    for unit, place in itertools.product(range(kind.units), range(kind.per_word)):
        column = unit * kind.unit + place * COLUMNS + 5
        more = [packed.scales[unit, place, :2]]
        more += [packed.offsets[unit, place // 2, :2]] if packed.offsets is not None else []
        operands = [*words[unit, :, 5].tolist(), *(int(word) & 0xFFFFFFFF for pair in more for word in pair)]
        found = halves(result_of(_assembly(kind.coding, place, kind.shift, kind.scale, 0, place % 2), *operands))
        assert bool(((found * factors - wanted[:, column]).abs() <= allowed[:, column]).all()), (unit, place)


@pytest.mark.parametrize(("half", "dtype"), [("bf16x2", torch.bfloat16), ("f16x2", torch.float16)])
def test_instructions_look_up_weights_of_nf4(half, dtype):
    kind = PackedKind("nf4", 64, 512, 64)
    for scale in torch.randn(8).abs().tolist():
        table = results_of(_nf4_table(half), {"$8": scale})
        # Each word of the table is given for both weights, of which the first is read.
        operands = {f"${3 + 2 * at}": table[f"${at}"] for at in range(8)}
        codes = torch.randint(16, (kind.per_word, 2)).int()
        words = [int(word) & 0xFFFFFFFF for word in _pack_columns(list(codes), kind)]
        for place in range(kind.per_word):
            found = results_of(_nf4_lookup(place), {**operands, "$1": words[0], "$2": words[1]})["$0"]
            wanted = (CODINGS["nf4"][codes[place].long()] * torch.tensor(scale)).to(dtype).view(torch.int16)
            assert [found & 0xFFFF, found >> 16] == [int(each) & 0xFFFF for each in wanted], place
