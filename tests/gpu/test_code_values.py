"""The instructions that make weights of codes, run one by one in Python: no interpreter of Triton's runs them."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from pillion.kernels.gpu.products.code_values import _assembly
from pillion.kernels.gpu.products.gpu_packing import ZERO_BASE, PackedKind, _columns, _joined
from pillion.kernels.torch.quantized_matrix import CODINGS

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
    return int.from_bytes(bytes(octets[selector >> 4 * at & 7] for at in range(4)), "little")


def looked_up(a: int, b: int, c: int, table: int) -> int:
    return sum((table >> (4 * (a >> at & 1) + 2 * (b >> at & 1) + (c >> at & 1)) & 1) << at for at in range(32))


def result_of(assembly: str, *operands: int) -> int:
    """Runs instructions over registers of 32 bits; returns $0."""
    known = {f"${number}": value for number, value in enumerate(operands, 1)}
    run = {
        "prmt.b32": permuted,
        "lop3.b32": looked_up,
        "shl.b32": lambda a, by: a << by & 0xFFFFFFFF,
        "shr.b32": lambda a, by: a >> by,
        "cvt.u16.u32": lambda a: a & 0xFFFF,
        "mov.b32": lambda low, high=0: low | high << 16,
        "fma.rn.bf16x2": lambda a, b, c: register(halves(a) * halves(b) + halves(c)),
    }
    for line in assembly.strip("{} ").split(";"):
        if line.strip() and ".reg" not in line:
            name, *words = re.findall(r"[\w$.]+", line)
            target, *values = words
            known[target] = run[name](*(known[word] if word in known else int(word) for word in values))
    return known["$0"]


def scales_of(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of all scales of a word, and what they stand for."""
    if kind == "bfloat16":
        values = torch.randn(2).bfloat16()
        return values.view(torch.int16).int() & 0xFFFF, values.double()
    numbers = torch.randint(120, 250, (4,)).int()
    if kind == "e8m0":
        return numbers, torch.exp2(numbers.double() - 253)
    return numbers, (1 + numbers % 8 / 8).double() * torch.exp2((numbers // 8).double() - 29)


@pytest.mark.parametrize(("coding", "scale", "zeros"), KINDS)
def test_instructions_make_the_weights_of_codes(coding, scale, zeros):
    kind = PackedKind(coding, 64, 512, 32, scale)
    known = (~CODINGS[coding].isnan()).nonzero().flatten()
    for _ in range(8):
        codes = known[torch.randint(len(known), (kind.per_word, 2))].int()
        stored = codes ^ 0x80 if coding == "int8" else codes
        words = [int(word) & 0xFFFFFFFF for word in _columns(list(stored), kind)]
        numbers, factors = (torch.zeros(1), torch.ones(1)) if scale == "float32" else scales_of(scale)
        subtracted = torch.randint(16, (2,)).double() * zeros
        operands = [*words, *([register(-ZERO_BASE - subtracted)] if zeros else [])]
        if scale != "float32":
            operands += [int(_joined(list(numbers), 32 // len(numbers))) & 0xFFFFFFFF] * 2
        for place, at in itertools.product(range(kind.per_word), range(len(factors))):
            wanted = (CODINGS[coding][codes[place].long()].double() - subtracted) * factors[at]
            found = result_of(_assembly(coding, place, zeros, scale, at), *operands)
            assert torch.equal(halves(found), wanted.bfloat16().double()), (place, at)
