"""Describes the uses of kernels that are built ahead of time (:mod:`pillion.kernels.gpu.build`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ARCHITECTURES = (80, 90)
# A thread has at most this many registers.
MAX_REGISTERS = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSpec:
    """Describes one kernel with the constants of one use.

    Attributes:
        kernel: the jitted function.
        signature: types of its arguments that are not constexpr, as ``triton.tools.compile`` reads them: ":16" marks
            multiples of 16, which Triton finds out when it launches.
        constants: values of all constexpr arguments and, as at a launch, ``num_warps`` (4) and ``num_stages`` (2).
        max_registers: limit per thread.
        max_spill_bytes: limit of local memory and stack per thread.
        architectures: those for which the kernel is built.
    """

    name: str
    kernel: Any
    signature: str
    constants: Mapping[str, Any]
    max_registers: int = MAX_REGISTERS
    max_spill_bytes: int = 0
    architectures: tuple[int, ...] = ARCHITECTURES
