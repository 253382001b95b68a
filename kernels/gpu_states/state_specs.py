"""Lists the uses of the kernels of states that are built ahead of time, without a GPU."""

from __future__ import annotations

from typing import Any

from pillion.kernels.gpu.build_spec import BuildSpec
from pillion.kernels.gpu_states import gpu_convolutions, gpu_delta_rule, gpu_gates, gpu_state_spaces
from pillion.kernels.gpu_states.gpu_delta_rule import DeltaShape
from pillion.kernels.gpu_states.gpu_state_spaces import SpaceShape

# A program with a tile of a matrix in one warp has at most so many registers, so that 16 of them fit into a processor.
TILE_REGISTERS = 255
_ARCH = 90
# Pages of a state and values of a slot, of Qwen3-Next in blocks of 16 tokens.
_PLACES = {"PAGES": 193, "SLOT_VALUES": 98304}
_QWEN = DeltaShape(16, 32, 128, 128)
_KIMI = DeltaShape(32, 32, 128, 128, by_rows=True)
_GRANITE = SpaceShape(128, 64, 1, 128)
_NEMOTRON = SpaceShape(128, 64, 8, 128)
_FALCON = SpaceShape(32, 128, 2, 256)


def build_specs() -> list[BuildSpec]:
    """Lists convolutions of LFM2 and Qwen3-Next, delta rules of Qwen3-Next and Kimi-Linear, and state spaces of
    Granite, Nemotron-H and Falcon-H1."""
    specs = [
        _convolution("lfm2-bf16", "bf16", 3, gated=True, bias=False),
        _convolution("lfm2-fp32", "fp32", 3, gated=True, bias=True),
        _convolution("mixed-bf16", "bf16", 4, gated=False, bias=True),
        _convolution("mixed-fp32", "fp32", 4, gated=False, bias=False),
        BuildSpec(
            name="unit_heads-128",
            kernel=gpu_delta_rule._unit_heads,
            signature="*fp32:16, i32:16, fp32",
            constants=gpu_delta_rule.unit_constants(_QWEN, _ARCH),
            max_registers=64,
        ),
        BuildSpec(
            name="forget_factors-bf16",
            kernel=gpu_delta_rule._forget_factors,
            signature="*bf16:16, *fp32:16, *fp32:16, *fp32:16, i32:16, i32",
            constants=gpu_delta_rule.factor_constants(_KIMI, _ARCH),
            max_registers=96,
        ),
    ]
    for name, dtype, delta in (
        ("qwen3_next-bf16", "bf16", _QWEN),
        ("kimi-bf16", "bf16", _KIMI),
        ("qwen3_next-fp32", "fp32", _QWEN),
    ):
        constants, _ = gpu_delta_rule.delta_constants(delta, _ARCH)
        pointers = ["*fp32:16", f"*{dtype}:16", *["*fp32:16"] * 5, *["*i32:16"] * 4]
        specs.append(_tile(f"delta_rule-{name}", gpu_delta_rule._delta_rule, pointers, constants))
    for name, dtype, space in (
        ("granite-bf16", "bf16", _GRANITE),
        ("nemotron-bf16", "bf16", _NEMOTRON),
        ("falcon-bf16", "bf16", _FALCON),
        ("granite-fp32", "fp32", _GRANITE),
    ):
        constants, _ = gpu_state_spaces.space_constants(space, _ARCH)
        pointers = ["*fp32:16", f"*{dtype}:16", *["*fp32:16"] * 5, *["*i32:16"] * 4, "i32:16"]
        specs.append(_tile(f"state_space-{name}", gpu_state_spaces._state_space, pointers, constants))
    return [*specs, *_gates()]


def _convolution(name: str, dtype: str, taps: int, *, gated: bool, bias: bool) -> BuildSpec:
    out = dtype if gated else "fp32"
    pointers = f"*{dtype}:16, *fp32:16, *fp32:16, *{out}:16, *fp32:16, " + ", ".join(["*i32:16"] * 4)
    return BuildSpec(
        name=f"convolve-{name}",
        kernel=gpu_convolutions._convolve,
        signature=f"{pointers}, i32:16, i32:16, i32:16",
        constants={**_PLACES, **gpu_convolutions.convolution_constants(taps, gated, bias, _ARCH)},
        max_registers=96,
    )


def _tile(name: str, kernel: Any, arguments: list[str], constants: dict[str, int]) -> BuildSpec:
    signature = ", ".join(arguments)
    return BuildSpec(
        name=name,
        kernel=kernel,
        signature=signature,
        constants={**_PLACES, **constants},
        max_registers=TILE_REGISTERS,
    )


def _gates() -> list[BuildSpec]:
    flags = {"OWN_WEIGHTS": False, "GATE_FIRST": False, "NORMED": True, "SIGMOID": False}
    uses = (
        ("norm_gated-128-bf16", 128, flags),
        ("norm_gated-128-bf16-sigmoid", 128, flags | {"SIGMOID": True}),
        ("norm_gated-8192-bf16-first", 8192, flags | {"OWN_WEIGHTS": True, "GATE_FIRST": True}),
        ("norm_gated-16384-bf16-first", 16384, flags | {"OWN_WEIGHTS": True, "GATE_FIRST": True}),
    )
    return [
        BuildSpec(
            name=name,
            kernel=gpu_gates._norm_gated,
            signature="*fp32:16, *bf16:16, *fp32:16, *bf16:16, i32, i32:16, i32:16, fp32",
            constants={**constants, **gpu_gates.gate_constants(width, _ARCH)},
            max_registers=128,
        )
        for name, width, constants in uses
    ]
