"""The uses of kernels that are built ahead of time, without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from lab.benchmarks.gpu.search import trying
from pillion.kernels.gpu import blocks
from pillion.kernels.gpu.attention import (
    kv_write,
    latent_attention,
    latent_write,
    overlapped_attention,
    paged_attention,
    parted_attention,
)
from pillion.kernels.gpu.attention.attention_kernel import _attend
from pillion.kernels.gpu.dependent import dependent
from pillion.kernels.gpu.experts import expert_adapters, expert_routing, expert_sums, grouped_product, pair_sorting
from pillion.kernels.gpu.experts.expert_routing import RouteOptions
from pillion.kernels.gpu.products import dense_gemm, fp8_product, head_product, low_rank_product, quantized_product
from pillion.kernels.gpu.products.gpu_packing import PackedKind
from pillion.kernels.gpu.rows import embedding, gated, norms
from pillion.kernels.gpu.sampling import gpu_sampling, sampling_edits, sampling_masks
from pillion.kernels.gpu.tuned import tuned
from pillion.kernels.gpu_states import gpu_convolutions, gpu_delta_rule, gpu_gates, gpu_selective_scan, gpu_state_spaces
from pillion.kernels.gpu_states.gpu_delta_rule import DeltaShape
from pillion.kernels.gpu_states.gpu_selective_scan import ScanShape
from pillion.kernels.gpu_states.gpu_state_spaces import SpaceShape

ARCHITECTURES = (80, 90)
# Registers per thread.
MAX_REGISTERS = 255
# Registers of a program with a tile of a matrix in one warp; 8 of them fit on a multiprocessor.
TILE_REGISTERS = 255
# Spills of programs with tiles of 128 rows that add up the parts of a packed matrix: three sums per result, spilled
# once per part, a hundredth of their instructions.
LARGE_TILE_SPILL_BYTES = 80
# Spills of expert tiles with sums of groups beside those of all inputs: mostly once per tile; with INT4 groups one pair
# of accesses per turn of the loop.
GROUP_SUM_SPILL_BYTES = 80
# Exact products of float32 keys, without tensor cores: a thread has rows of both sides. For comparisons.
EXACT_KEYS_SPILL_BYTES = 4552
_ARCH = 90
# Pages of a state and values of a slot, of Qwen3-Next in blocks of 16 tokens.
_PLACES = {"PAGES": 238, "SLOT_VALUES": 98304}
_QWEN = DeltaShape(16, 32, 128, 128)
_KIMI = DeltaShape(32, 32, 128, 128, by_rows=True)
_GRANITE = SpaceShape(128, 64, 1, 128)
_NEMOTRON = SpaceShape(128, 64, 8, 128)
_FALCON = SpaceShape(32, 128, 2, 256)
_JAMBA = ScanShape(8192, 16)
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_WORD_NAMES = {8: "*i64", 4: "*i32", 2: "*i16", 1: "*u8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSpec:
    """One kernel with the constants of one use.

    Attributes:
        kernel: the jitted function.
        signature: types of its non-constexpr arguments, as ``triton.tools.compile`` reads them; ":16" marks multiples
            of 16, which Triton detects at a launch.
        constants: values of all constexpr arguments and, as at a launch, ``num_warps`` (4) and ``num_stages`` (2).
        max_registers: limit per thread.
        max_spill_bytes: limit of local memory and stack per thread.
        architectures: targets.
    """

    name: str
    kernel: Any
    signature: str
    constants: Mapping[str, Any]
    max_registers: int = MAX_REGISTERS
    max_spill_bytes: int = 0
    architectures: tuple[int, ...] = ARCHITECTURES


def kv_write_specs() -> list[BuildSpec]:
    """List Llama 3 8B, heads of other sizes, norms, and KV in fp8."""
    return [
        _kv_write_spec("llama3-bf16", 32, 8, 128, "bf16", "bf16"),
        _kv_write_spec("llama3-fp16", 32, 8, 128, "fp16", "fp16"),
        _kv_write_spec("llama3-fp8", 32, 8, 128, "bf16", "u8"),
        _kv_write_spec("qwen3-bf16", 32, 8, 128, "bf16", "bf16", norm=True),
        _kv_write_spec("qwen3-fp8", 32, 8, 128, "bf16", "u8", norm=True),
        _kv_write_spec("hunyuan-bf16", 32, 8, 128, "bf16", "bf16", norm=True, norm_last=True),
        _kv_write_spec("command-r-plus-bf16", 96, 8, 128, "bf16", "bf16", norm=True, centred=True),
        _kv_write_spec("nope-bf16", 16, 4, 128, "bf16", "bf16", rope=False),
        _kv_write_spec("head64-bf16", 9, 3, 64, "bf16", "bf16"),
        _kv_write_spec("head80-fp8", 32, 32, 80, "fp16", "u8"),
        _kv_write_spec("head96-bf16", 32, 32, 96, "bf16", "bf16"),
        _kv_write_spec("head256-bf16", 8, 4, 256, "bf16", "bf16", norm=True),
        _kv_write_spec("head512-bf16", 32, 4, 512, "bf16", "bf16", norm=True),
        _kv_write_spec("head512-fp8", 32, 4, 512, "bf16", "u8", norm=True),
        _kv_write_spec("head128-fp32", 32, 8, 128, "fp32", "fp32", norm=True),
        _kv_write_spec("values-bf16", 8, 2, 256, "bf16", "bf16", norm=True, values=True),
        _kv_write_spec("queries-bf16", 8, 0, 256, "bf16", "bf16", norm=True),
        _kv_write_spec("rank-bf16", 16, 4, 128, "bf16", "bf16", norm=True, pool_heads=8),
        _kv_write_spec("rank-fp8", 16, 4, 128, "bf16", "u8", pool_heads=8),
    ]


def _kv_write_spec(
    name: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    kv: str,
    *,
    norm: bool = False,
    norm_last: bool = False,
    centred: bool = False,
    values: bool = False,
    rope: bool = True,
    pool_heads: int = 0,
) -> BuildSpec:
    """Make one use. The kernel writes the last heads of a pool of ``pool_heads`` heads; 0: the heads it writes."""
    pool_heads = pool_heads or kv_heads
    mine = range(pool_heads - kv_heads, pool_heads)
    scales = "*fp32" if kv == "u8" else f"*{kv}"
    # LayerNorm weights are float32.
    weights = "fp32" if centred else dtype
    pointers = f"*{dtype}:16, *{weights}:16, *fp32:16, *fp32:16, *i32:16, *i32:16, *{kv}:16, {scales}:16"
    return BuildSpec(
        name=f"kv_write-{name}",
        kernel=kv_write._kv_write,
        signature=f"{pointers}, i32:16, i32:16, fp32",
        constants={
            "NORM": norm,
            "NORM_LAST": norm_last,
            "CENTRED": centred,
            "VALUES": values,
            "ROPE": rope,
            "FP8": kv == "u8",
            **kv_write._constants(heads, mine, pool_heads, head_dim, 16, 90),
        },
        max_registers=96,
    )


def latent_attention_specs() -> list[BuildSpec]:
    """List DeepSeek V3, its share of one rank out of eight, and other types."""
    deepseek = {"HEADS": 128, "RANK": 512, "ROTARY": 64, "BLOCK_SIZE": 16}
    cases = [
        ("", "bf16", deepseek),
        ("_fp16", "fp16", deepseek),
        ("_fp8", "bf16", deepseek),
        ("_fp32", "fp32", deepseek),
        ("_rank", "bf16", {**deepseek, "HEADS": 16}),
        ("_256", "bf16", {**deepseek, "HEADS": 40, "RANK": 256, "ROTARY": 32, "BLOCK_SIZE": 32}),
    ]
    specs = [
        _latent_attention_spec(kernel, name, arch, dtype, shape)
        for name, dtype, shape in cases
        for kernel in ("latents_decode", "latents_chunk")
        for arch in ARCHITECTURES
    ]
    return specs + [
        _latent_parts_spec(place, name, arch, dtype, shape)
        for name, dtype, shape in cases[:4]
        for place in range(2)
        for arch in ARCHITECTURES
    ]


def _latent_attention_spec(kernel: str, name: str, arch: int, dtype: str, shape: dict[str, int]) -> BuildSpec:
    fp8 = name == "_fp8"
    constants, _ = latent_attention._constants(kernel, arch, shape, fp8, 4 if dtype == "fp32" else 2)
    pool, scales = ("*u8", "*fp32") if fp8 else (f"*{dtype}", f"*{dtype}")
    pointers = f"*{dtype}:16, {pool}:16, {scales}:16, *i32:16, i32, i32, i32:16, *{dtype}:16, *fp32:16, *fp32:16"
    return BuildSpec(
        name=f"{kernel}{name}",
        kernel=latent_attention._attend_latents,
        signature=f"{pointers}, *i32:16, i32:16, i32:16, i32, i32, fp32",
        constants=constants,
        architectures=(arch,),
    )


def _latent_parts_spec(place: int, name: str, arch: int, dtype: str, shape: dict[str, int]) -> BuildSpec:
    """Make latent attention in parts, of decodes (``place`` 0) or of chunks (1)."""
    fp8 = name == "_fp8"
    each = latent_attention._parted_constants(arch, shape, fp8, 4 if dtype == "fp32" else 2, 131072, 132)
    constants, _ = each[:2][place]
    pool, scales = ("*u8", "*fp32") if fp8 else (f"*{dtype}", f"*{dtype}")
    pointers = f"*{dtype}:16, {pool}:16, {scales}:16, *i32:16, i32, *{dtype}:16, *fp32:16, *fp32:16"
    return BuildSpec(
        name=f"latents_parts_{('decode', 'chunk')[place]}{name}",
        kernel=latent_attention._attend_latent_parts,
        signature=f"{pointers}, i32:16, i32:16, i32:16, i32, i32, fp32",
        constants=constants,
        architectures=(arch,),
    )


def latent_write_specs() -> list[BuildSpec]:
    """List DeepSeek V3 in bfloat16, with 8-bit rows, and in float32."""
    return [
        BuildSpec(
            name=f"latent_write-{name}",
            kernel=latent_write._latent_write,
            signature=", ".join([f"*{dtype}:16"] * 6 + ["*i32:16"] * 2 + [f"*{kv}:16", f"*{scales}:16", "i32", "fp32"]),
            constants={"WIDE": False, "FP8": kv == "u8", **latent_write._constants(128, 512, 64, 128, 61, 16, 90)},
            max_registers=96,
        )
        for name, dtype, kv, scales in (
            ("bf16", "bf16", "bf16", "bf16"),
            ("fp8", "bf16", "u8", "fp32"),
            ("fp32", "fp32", "fp32", "fp32"),
        )
    ]


def paged_attention_specs() -> list[BuildSpec]:
    """List Llama 3 8B and the differences of other models."""
    llama = {
        "KV_HEADS": 8,
        "POOL_HEADS": 8,
        "GROUP": 4,
        "HEAD_DIM": 128,
        "BLOCK_SIZE": 16,
        "WINDOW": 0,
        "SOFTCAP": False,
        "SINKS": False,
    }
    # Gemma 4's layers with full attention.
    wide = {"HEAD_DIM": 512, "GROUP": 8, "KV_HEADS": 4, "POOL_HEADS": 4}
    cases: list[tuple[str, str, paged_attention.PlainOrFloat8, dict[str, Any]]] = [
        ("", "bf16", "plain", {}),
        ("_fp16", "fp16", "plain", {}),
        ("_fp8", "bf16", "fp8_e4m3", {}),
        ("_fp8_fp16", "fp16", "fp8_e4m3", {}),
        ("_fp32", "fp32", "plain", {}),
        ("_qwen_28_heads", "bf16", "plain", {"GROUP": 7, "KV_HEADS": 4, "POOL_HEADS": 4, "BLOCK_SIZE": 64}),
        ("_64", "bf16", "plain", {"HEAD_DIM": 64}),
        ("_64_fp8", "bf16", "fp8_e4m3", {"HEAD_DIM": 64}),
        ("_sinks", "bf16", "plain", {"HEAD_DIM": 64, "GROUP": 8, "WINDOW": 128, "SINKS": True}),
        ("_sinks_all", "bf16", "plain", {"HEAD_DIM": 64, "GROUP": 8, "SINKS": True}),
        ("_sinks_fp8", "bf16", "fp8_e4m3", {"HEAD_DIM": 64, "GROUP": 8, "SINKS": True}),
        ("_96", "bf16", "plain", {"HEAD_DIM": 96, "GROUP": 1, "KV_HEADS": 32, "POOL_HEADS": 32}),
        ("_256", "bf16", "plain", {"HEAD_DIM": 256}),
        ("_256_fp8", "bf16", "fp8_e4m3", {"HEAD_DIM": 256}),
        ("_wide_group", "bf16", "plain", {"GROUP": 28, "KV_HEADS": 2, "POOL_HEADS": 2}),
        ("_rank", "bf16", "plain", {"KV_HEADS": 4}),
        ("_rank_fp8", "bf16", "fp8_e4m3", {"KV_HEADS": 4}),
        ("_window_softcap", "bf16", "plain", {"WINDOW": 4096, "SOFTCAP": True}),
        ("_256_window_softcap", "bf16", "plain", {"HEAD_DIM": 256, "GROUP": 2, "WINDOW": 4096, "SOFTCAP": True}),
        # Negative window: chunks of positions.
        ("_llama4", "bf16", "plain", {"GROUP": 5, "WINDOW": -8192}),
        ("_llama4_fp8", "bf16", "fp8_e4m3", {"GROUP": 5, "WINDOW": -8192}),
        ("_512", "bf16", "plain", wide),
        ("_512_fp16", "fp16", "plain", wide),
        ("_512_fp8", "bf16", "fp8_e4m3", wide),
        ("_512_fp32", "fp32", "plain", wide),
        ("_512_window_softcap", "bf16", "plain", {**wide, "WINDOW": 4096, "SOFTCAP": True}),
    ]
    specs = [
        _paged_attention_spec(kernel, name, arch, dtype, kv, {**llama, **other})
        for name, dtype, kv, other in cases
        for kernel in ("attention_decode", "attention_chunk")
        for arch in ARCHITECTURES
    ]
    parted = {"", "_fp16", "_fp8", "_fp32", "_64", "_sinks", "_256", "_256_fp8", "_256_window_softcap"}
    parted |= {"_512", "_512_fp8", "_512_fp32", "_llama4"}
    specs += [
        _parted_attention_spec(place, name, arch, dtype, kv, {**llama, **other})
        for name, dtype, kv, other in cases
        for place in range(2)
        for arch in ARCHITECTURES
        if name in parted
    ]
    return [*specs, *_merge_specs()]


def _merge_specs() -> list[BuildSpec]:
    """List the merges of parts for Llama 3 8B, and for heads (or latents) of 512 values."""
    heads = {"KV_HEADS": 8, "GROUP": 4, "SINKS": False}
    return [
        BuildSpec(
            name=f"attention_parts_merge{name}",
            kernel=parted_attention._merge_parts,
            signature="*i32:16, i32, *fp32:16, *fp32:16, *bf16:16, *fp32:16",
            constants={**paged_attention.merge_constants(90, {**heads, "HEAD_DIM": width}, 64, 128), "PARTS": parts},
            max_registers=128,
        )
        for name, width, parts in (("", 128, 8), ("_512", 512, 4))
    ]


def overlapped_attention_specs() -> list[BuildSpec]:
    """List Llama 3 8B and the differences of other models, for Hopper."""
    llama = {"KV_HEADS": 8, "POOL_HEADS": 8, "GROUP": 4, "HEAD_DIM": 128, "BLOCK_SIZE": 16}
    plain = {"WINDOW": 0, "SOFTCAP": False, "SINKS": False}
    cases: list[tuple[str, str, int, int, dict[str, Any]]] = [
        ("", "bf16", 128, 3, {}),
        ("_2_buffers", "bf16", 128, 2, {}),
        ("_fp16", "fp16", 128, 3, {"GROUP": 7, "KV_HEADS": 4, "POOL_HEADS": 4, "BLOCK_SIZE": 64}),
        ("_sinks", "bf16", 128, 3, {"HEAD_DIM": 64, "GROUP": 8, "WINDOW": 128, "SINKS": True}),
        ("_window_softcap", "bf16", 128, 2, {"WINDOW": 4096, "SOFTCAP": True}),
        ("_llama4", "bf16", 128, 3, {"GROUP": 5, "WINDOW": -8192}),
        ("_256", "bf16", 64, 2, {"HEAD_DIM": 256, "GROUP": 2, "WINDOW": 4096, "SOFTCAP": True}),
        ("_512", "bf16", 32, 2, {"HEAD_DIM": 512, "GROUP": 8}),
    ]
    use = tuned("attention_chunk", 90, head_dim=128, kv="plain", bytes=2)
    return [
        BuildSpec(
            name=f"overlapped_chunk{name}",
            kernel=overlapped_attention._attend_overlapped,
            signature=_attention_signature(dtype, f"*{dtype}", f"*{dtype}"),
            constants=paged_attention.overlapped_constants(
                {
                    **llama,
                    **plain,
                    **other,
                    "BLOCK_M": use["rows"] if name != "_512" else use["rows"] // 2,
                    "BLOCK_N": keys,
                    **paged_attention.joining("attention_chunk", 90, head_dim=other.get("HEAD_DIM", 128)),
                    "num_warps": use["num_warps"],
                    "num_stages": buffers,
                    **dependent(90),
                }
            ),
            max_spill_bytes=paged_attention.WIDE_SPILL_BYTES if name == "_256" else 0,
            architectures=(90,),
        )
        for name, dtype, keys, buffers, other in cases
    ]


def _attention_signature(dtype: str, pool: str, scales: str) -> str:
    pointers = f"*{dtype}:16, {pool}:16, {scales}:16, *i32:16, i32, i32, i32:16, *{dtype}:16, *fp32:16, *fp32:16"
    return f"{pointers}, *i32:16, *fp32:16, i32:16, i32:16, i32:16, i32, i32, fp32, fp32"


def _paged_attention_spec(
    kernel: str, name: str, arch: int, dtype: str, kv: paged_attention.PlainOrFloat8, shape: dict[str, Any]
) -> BuildSpec:
    constants, _ = paged_attention._attend_constants(
        kernel, arch, shape, kv, 4 if dtype == "fp32" else 2, shape["WINDOW"] != 0
    )
    pool, scales = ("*u8", "*fp32") if kv == "fp8_e4m3" else (f"*{dtype}", f"*{dtype}")
    wide = arch == _ARCH and constants["BLOCK_D"] == paged_attention.WIDE_HEAD_DIM
    return BuildSpec(
        name=f"{kernel}{name}",
        kernel=_attend,
        signature=_attention_signature(dtype, pool, scales),
        constants=constants,
        max_spill_bytes=paged_attention.WIDE_SPILL_BYTES if wide and constants["FP8"] and constants["EDGES"] else 0,
        architectures=(arch,),
    )


def _parted_attention_spec(
    place: int, name: str, arch: int, dtype: str, kv: paged_attention.PlainOrFloat8, shape: dict[str, Any]
) -> BuildSpec:
    """Make attention in parts, of decodes (``place`` 0) or of chunks (1)."""
    windowed, keys = shape["WINDOW"] != 0, 131072
    each = paged_attention._parted_constants(arch, shape, kv, 4 if dtype == "fp32" else 2, windowed, keys, 132)
    constants, _ = each[:2][place]
    pool, scales = ("*u8", "*fp32") if kv == "fp8_e4m3" else (f"*{dtype}", f"*{dtype}")
    pointers = f"*{dtype}:16, {pool}:16, {scales}:16, *i32:16, i32, *{dtype}:16, *fp32:16, *fp32:16, *fp32:16"
    return BuildSpec(
        name=f"attention_parts_{('decode', 'chunk')[place]}{name}",
        kernel=parted_attention._attend_parts,
        signature=f"{pointers}, i32:16, i32:16, i32:16, i32:16, i32, i32, fp32, fp32",
        constants=constants,
        max_spill_bytes=parted_attention.SPILL_BYTES.get(constants["BLOCK_D"], 0) if arch == _ARCH else 0,
        architectures=(arch,),
    )


def blocks_specs() -> list[BuildSpec]:
    """List Llama 3 8B's blocks, plain and fp8, and blocks that no large word divides."""
    llama3 = 32 * 2 * 8 * 16 * 128
    return [
        _blocks_spec("llama3-gather", 2 * llama3, 8, "source"),
        _blocks_spec("llama3-scatter", 2 * llama3, 8, "target"),
        _blocks_spec("llama3-copy", 2 * llama3, 8, "pairs"),
        _blocks_spec("llama3-fp8-copy", llama3 // 128 * 132, 8, "pairs"),
        _blocks_spec("small-words-copy", 2**20 + 4, 4, "pairs"),
        _blocks_spec("bytes-copy", 2**20 + 1, 1, "pairs"),
    ]


def _blocks_spec(name: str, block_bytes: int, word: int, paired: str) -> BuildSpec:
    return BuildSpec(
        name=f"blocks-{name}",
        kernel=blocks._move,
        signature=f"{_WORD_NAMES[word]}:16, {_WORD_NAMES[word]}:16, *i32:16",
        constants={"PAIRED": paired, **blocks._constants(block_bytes, word, 90)},
        max_registers=64,
    )


def low_rank_product_specs() -> list[BuildSpec]:
    """List shrinks and expands of adapters."""
    specs = []
    for dtype in ("bf16", "fp16", "fp32"):
        for rank in (16, 64, 256):
            layer = low_rank_product.LayerSlot(0, 0, 4096, 6144, (4096, 5120, 6144), rank)
            pointers = f"*{dtype}:16, *{dtype}:16, *i32:16, *i32:16, *{dtype}:16"
            if rank == low_rank_product.RANK_MULTIPLE:
                specs.append(
                    BuildSpec(
                        name=f"low_rank_shrink-{dtype}",
                        kernel=low_rank_product._shrink,
                        signature=pointers + 7 * ", i32:16",
                        constants=low_rank_product._shrink_constants(),
                    )
                )
            specs.append(
                BuildSpec(
                    name=f"low_rank_expand-{rank}-{dtype}",
                    kernel=low_rank_product._expand,
                    signature=pointers + 10 * ", i32:16",
                    constants=low_rank_product._expand_constants(layer, 4 if dtype == "fp32" else 2),
                )
            )
    # Routers and gates have float32 matrices.
    exact = BuildSpec(
        name="low_rank_shrink-exact",
        kernel=low_rank_product._shrink,
        signature="*bf16:16, *fp32:16, *i32:16, *i32:16, *fp32:16" + 7 * ", i32:16",
        constants=low_rank_product._shrink_constants(),
    )
    return [*specs, exact]


def dense_gemm_specs() -> list[BuildSpec]:
    """List Llama 3 8B's products, a small matrix whose last tiles are not full, and other types."""
    cases = [
        ("qkv", 4096, 6144, "bf16"),
        ("o", 4096, 4096, "bf16"),
        ("gate_up", 4096, 28672, "bf16"),
        ("down", 14336, 4096, "bf16"),
        ("small", 576, 1500, "bf16"),
        ("o_fp16", 4096, 4096, "fp16"),
        ("o_fp32", 4096, 4096, "fp32"),
    ]
    rows = (*dense_gemm.ROW_TILES, dense_gemm.SPLIT_K_MAX_ROWS + 1)
    return [_dense_gemm_spec(*case, count, arch) for case, count, arch in product(cases, rows, ARCHITECTURES)]


def _dense_gemm_spec(name: str, inputs: int, outputs: int, dtype: str, rows: int, arch: int) -> BuildSpec:
    constants = dense_gemm._constants(inputs, outputs, rows, 4 if dtype == "fp32" else 2, arch)
    sizes = [f"i32{':16' if size % 16 == 0 else ''}" for size in (inputs, outputs)]
    return BuildSpec(
        name=f"plain_{name}-{rows}",
        kernel=dense_gemm._product,
        signature=", ".join([f"*{dtype}:16"] * 4 + ["*fp32:16", "*i32:16", "i32", *sizes, "i32:16"]),
        constants={"HAS_BIAS": False, **constants},
        architectures=(arch,),
    )


def fp8_product_specs() -> list[BuildSpec]:
    """List rows of Llama 3 8B's and their products with scales per output and per block."""
    use, sizes = tuned("fp8_rows", _ARCH), "i32, i32:16"
    rows = [
        BuildSpec(
            name=f"fp8_rows-{name}",
            kernel=fp8_product._round_rows,
            signature=f"*bf16:16, *u8:16, *fp32:16, {sizes}",
            constants={"IN_BLOCKS": name == "blocks", "WIDE": use["block"], "num_warps": use["num_warps"]},
        )
        for name in ("outputs", "blocks")
    ]
    products = [
        BuildSpec(
            name=f"fp8_product_{name}-{tile}",
            kernel=fp8_product._product,
            signature=f"*u8:16, *fp32:16, *u8:16, *fp32:16, *bf16:16, *bf16:16, {sizes}, i32:16, i32, i32:16",
            constants={"HAS_BIAS": False, "SPLIT_K": False, **fp8_product._constants(tile, name == "blocks", _ARCH)},
            architectures=(_ARCH,),
        )
        for name in ("outputs", "blocks")
        for tile in dense_gemm.ROW_TILES
    ]
    return rows + products


def head_product_specs() -> list[BuildSpec]:
    """List DeepSeek V3's queries, whose matrices are transposed beside those of its values."""
    return [
        BuildSpec(
            name=f"head_product-{dtype}",
            kernel=head_product._head_product,
            # The last stride of the matrices is 1 or not, which a launch detects.
            signature=", ".join([f"*{dtype}:16"] * 3 + ["i32"] + ["i32:16"] * 6 + ["i32", "i32:16", "i32:16"]),
            constants=head_product._constants(4 if dtype == "fp32" else 2, _ARCH),
        )
        for dtype in ("bf16", "fp32")
    ]


def quantized_product_specs() -> list[BuildSpec]:
    """List Llama 3 8B's down and gate_up products, and the differences of other matrices."""
    down, up = (4096, 14336), (28672, 4096)
    cases = [
        ("uint4_128", PackedKind("uint4", *down, 128, shift="zeros"), "bf16"),
        ("uint4_128_whole", PackedKind("uint4", *up, 128, shift="zeros"), "bf16"),
        ("signed4_32", PackedKind("signed4", *down, 32, "two_halves", "offsets"), "bf16"),
        ("signed4_64", PackedKind("signed4", *down, 64, "two_halves", "offsets"), "bf16"),
        ("signed8_32", PackedKind("signed8", *down, 32, "two_halves"), "bf16"),
        ("signed8_16", PackedKind("signed8", *down, 16, "two_halves", "offsets"), "bf16"),
        ("int4_128", PackedKind("int4", *down, 128), "bf16"),
        ("int4_32_halves", PackedKind("int4", *down, 32, "bfloat16"), "bf16"),
        ("int4_32_float16", PackedKind("int4", *down, 32, "float16"), "bf16"),
        ("uint4_32_float16", PackedKind("uint4", *down, 32, "float16", "zeros"), "bf16"),
        ("uint4_32_halves", PackedKind("uint4", *down, 32, "bfloat16", "zeros"), "bf16"),
        ("nf4_64", PackedKind("nf4", *down, 64), "bf16"),
        ("mxfp4", PackedKind("fp4_e2m1", *down, 32, "e8m0"), "bf16"),
        ("nvfp4", PackedKind("fp4_e2m1", *down, 16, "e5m3"), "bf16"),
        ("int8", PackedKind("int8", *down, 0), "bf16"),
        ("int8_16", PackedKind("int8", *down, 16, shift="offsets"), "bf16"),
        ("int8_ragged", PackedKind("int8", 576, 1500, 32), "bf16"),
        ("fp8_128", PackedKind("fp8_e4m3", *down, 128), "bf16"),
        ("uint4_128_fp32", PackedKind("uint4", *down, 128, shift="zeros"), "fp32"),
    ]
    specs = [
        _quantized_product_spec(name, kind, dtype, rows, arch)
        for (name, kind, dtype), rows, arch in product(cases, dense_gemm.ROW_TILES, ARCHITECTURES)
    ]
    use = tuned("quantized_sum", 90)
    constants = {"SPLITS": 4, "HAS_BIAS": False, "BLOCK": use["block"], "DEPENDENT": True}
    constants |= {"num_warps": use["num_warps"]}
    signature = "*fp32:16, *bf16:16, *bf16:16, i32, i32:16"
    return [
        *specs,
        BuildSpec(name="quantized_sum", kernel=quantized_product._sum, signature=signature, constants=constants),
    ]


def _quantized_product_spec(name: str, kind: PackedKind, dtype: str, rows: int, arch: int) -> BuildSpec:
    constants = quantized_product._constants(kind, rows, _TYPES[dtype], arch)
    inputs = "i32:16" if kind.inputs % 16 == 0 else "i32"
    target = "fp32" if constants["SPLIT_K"] else dtype
    scales = "i32" if kind.scale != "float32" else "fp32"
    pointers = f"*{dtype}:16, *i32:16, *{scales}:16, *{scales}:16, *fp32:16, *fp32:16, *{dtype}:16, *{target}:16"
    return BuildSpec(
        name=f"quantized_{name}-{rows}",
        kernel=quantized_product._product,
        signature=f"{pointers}, i32, {inputs}, i32:16, i32:16, i32",
        constants={"HAS_BIAS": False, **constants},
        max_spill_bytes=LARGE_TILE_SPILL_BYTES if constants["BLOCK_T"] == dense_gemm.ROW_TILES[-1] else 0,
        architectures=(arch,),
    )


def expert_specs() -> list[BuildSpec]:
    """List routers, sorting and sums of Qwen3-30B-A3B, gpt-oss-20b, DeepSeek V2 Lite and DeepSeek V3."""
    routers: tuple[tuple[str, RouteOptions, int, str, dict[str, bool]], ...] = (
        ("qwen3", RouteOptions(128, 8, True), 2048, "bf16", {}),
        ("gpt_oss", RouteOptions(32, 4, True), 2880, "bf16", {"BIAS": True}),
        ("deepseek_lite", RouteOptions(64, 6, False), 2048, "bf16", {}),
        (
            "deepseek_v3",
            RouteOptions(256, 8, True, sigmoid=True, exact=True, scale=2.5, groups=8, kept_groups=4),
            7168,
            "bf16",
            {"CHOICE_BIAS": True},
        ),
        ("qwen3_next", RouteOptions(512, 10, True), 2048, "bf16", {}),
        ("qwen3_next_shared", RouteOptions(512, 10, True, always=1), 2048, "bf16", {"GATE": True}),
        ("qwen2_shared", RouteOptions(60, 4, False, always=4), 2048, "bf16", {"GATE": True}),
        ("deepseek_lite_shared", RouteOptions(64, 6, False, always=2), 2048, "bf16", {}),
        ("qwen3_fp32", RouteOptions(128, 8, True), 2048, "fp32", {}),
        ("qwen3_adapted", RouteOptions(128, 8, True), 2048, "bf16", {"ADDED": True}),
    )
    specs = [
        _route_spec(f"{name}-{tokens}", how, hidden, dtype, flags, tokens, arch)
        for name, how, hidden, dtype, flags in routers
        for tokens in (16, 2048)
        for arch in ARCHITECTURES
    ]
    use, columns = tuned("sort_pairs", _ARCH), {"EXPERTS": 128}
    compared, block = {"COMPARED": pair_sorting.COMPARED}, {"BLOCK_PAIRS": pair_sorting.BLOCK_PAIRS}
    summed = {"SUMMED": pair_sorting.SUMMED_COUNTS // 128, "num_warps": use["sum_warps"]}
    warps = {"num_warps": use["num_warps"]}
    sorting: tuple[tuple[Any, str, dict[str, int]], ...] = (
        (pair_sorting._count, "*i32:16, *i32:16, i32", {**block, **warps}),
        (pair_sorting._sum_up, "*i32:16, *i32:16, *i32:16, i32, i32", summed),
        (pair_sorting._place, "*i32:16, *i32:16, *i32:16, i32, i32", {**block, **compared, **warps}),
    )
    return [
        *specs,
        *(
            BuildSpec(
                name=f"pairs{kernel.__name__}", kernel=kernel, signature=signature, constants={**columns, **constants}
            )
            for kernel, signature, constants in sorting
        ),
        BuildSpec(
            name="expert_sums",
            kernel=expert_sums._add_up,
            signature="*bf16:16, *fp32:16, *i32:16, *bf16:16, *bf16:16, i32:16, i32",
            constants={"BESIDE": True, **expert_sums.sum_constants(9, _ARCH)},
            max_registers=64,
        ),
    ]


def _route_spec(
    name: str, how: RouteOptions, hidden: int, dtype: str, flags: dict[str, bool], tokens: int, arch: int
) -> BuildSpec:
    constants = expert_routing.route_constants(how, hidden, tokens, 4 if dtype == "fp32" else 2, arch)
    rows, wide, whole = f"*{dtype}:16", "*fp32:16", "*i32:16"
    gate = rows if flags.get("GATE") else wide
    pointers = [rows, rows, wide, wide, wide, wide, gate, whole, wide, whole, wide, *(whole,) * 4]
    numbers = ["i32", "i32", "i32:16", "fp32", "i32", "i32", "i32"]
    few = tokens * how.choices <= pair_sorting.FEW_PAIRS
    sorting = {"SORTED": pair_sorting.FEW_PAIRS if few else 0, "OWN_COLUMNS": how.columns}
    nothing = dict.fromkeys(("BIAS", "CHOICE_BIAS", "FACTORS", "ADDED", "GATE"), False)
    return BuildSpec(
        name=f"route-{name}",
        kernel=expert_routing._route,
        signature=", ".join(pointers + numbers),
        constants={**nothing, **flags, **sorting, **constants},
        architectures=(arch,),
    )


def grouped_product_specs() -> list[BuildSpec]:
    """List both products of the experts of Qwen3-30B-A3B, gpt-oss and DeepSeek-V2-Lite, and the differences of other
    matrices."""
    qwen_up, qwen_down, oss_up, oss_down = (1536, 2048), (2048, 768), (5760, 2880), (2880, 2880)
    clamped = (1.702, 7.0)
    cases: list[tuple[str, tuple[int, int], PackedKind | None, str, grouped_product.Activation | None]] = [
        ("qwen3_up", qwen_up, None, "bf16", "silu"),
        ("qwen3_down", qwen_down, None, "bf16", None),
        ("deepseek_up", (2816, 2048), None, "bf16", "silu"),
        ("deepseek_down", (2048, 1408), None, "bf16", None),
        ("oss_up", oss_up, PackedKind("fp4_e2m1", *oss_up, 32, "e8m0"), "bf16", clamped),
        ("oss_down", oss_down, PackedKind("fp4_e2m1", *oss_down, 32, "e8m0"), "bf16", None),
        ("nvfp4_up", qwen_up, PackedKind("fp4_e2m1", *qwen_up, 16, "e5m3"), "bf16", "silu"),
        ("int4_up", qwen_up, PackedKind("int4", *qwen_up, 128), "bf16", "silu"),
        ("int4_32_up", qwen_up, PackedKind("int4", *qwen_up, 32, "bfloat16"), "bf16", "silu"),
        ("int4_32_float16_up", qwen_up, PackedKind("int4", *qwen_up, 32, "float16"), "bf16", "silu"),
        ("uint4_32_up", qwen_up, PackedKind("uint4", *qwen_up, 32, "float16", "zeros"), "bf16", "silu"),
        ("signed4_up", qwen_up, PackedKind("signed4", *qwen_up, 32, "two_halves", "offsets"), "bf16", "silu"),
        ("signed8_up", qwen_up, PackedKind("signed8", *qwen_up, 16, "two_halves"), "bf16", "silu"),
        ("uint4_up", qwen_up, PackedKind("uint4", *qwen_up, 128, shift="zeros"), "bf16", "silu"),
        ("int8_up", qwen_up, PackedKind("int8", *qwen_up, 0), "bf16", "silu"),
        ("fp8_up", qwen_up, PackedKind("fp8_e4m3", *qwen_up, 128), "bf16", "silu"),
        ("fp8_down", qwen_down, PackedKind("fp8_e4m3", *qwen_down, 128), "bf16", None),
        ("nf4_up", qwen_up, PackedKind("nf4", *qwen_up, 64), "bf16", "gelu_tanh"),
        ("plain_fp16", qwen_up, None, "fp16", "relu2"),
        ("plain_fp32", qwen_up, None, "fp32", "silu"),
    ]
    specs = [
        _grouped_product_spec(*case, rows, arch)
        for case, rows, arch in product(cases, dense_gemm.ROW_TILES, ARCHITECTURES)
        if rows <= grouped_product.most_rows(case[2], _TYPES[case[3]], arch)
    ]
    # Ranks of steps with adapters.
    some = ("qwen3_up", "qwen3_down", "oss_up", "int4_up", "fp8_up", "plain_fp32")
    ranks = {"qwen3_up": (16, 64), **dict.fromkeys(some[1:], (16,))}
    return specs + [
        _grouped_product_spec(*case, rows, arch, rank)
        for case, rows, arch in product(cases, dense_gemm.ROW_TILES, ARCHITECTURES)
        if rows <= grouped_product.most_rows(case[2], _TYPES[case[3]], arch)
        for rank in ranks.get(case[0], ())
    ]


def expert_adapter_specs() -> list[BuildSpec]:
    """List both shrinks of Qwen3-30B-A3B, by rows of a tile."""
    described = "*i32:16, *i32:16, *i32:16, *i32:16"
    return [
        BuildSpec(
            name=f"shrink_pairs-{name}-{dtype}-{rows}",
            kernel=expert_adapters._shrink_pairs,
            signature=f"*{dtype}:16, {described}, *{dtype}:16, *{dtype}:16, i32, i32, i32:16, i32:16",
            constants={"GATHERED": name == "up", **expert_adapters.shrink_constants(layer, rows, size, arch)},
            architectures=(arch,),
        )
        for name, layer in (("up", _adapted(1536, 2048, True, 16)), ("down", _adapted(2048, 768, False, 16)))
        for dtype, size in (("bf16", 2), ("fp32", 4))
        for rows, arch in product(dense_gemm.ROW_TILES, ARCHITECTURES)
    ]


def _adapted(outputs: int, inputs: int, gated: bool, rank: int) -> low_rank_product.LayerSlot:
    """Return the slot of an adapter's matrices for the experts of a layer."""
    ends = (outputs // 2, outputs) if gated else (outputs,)
    return low_rank_product.LayerSlot(0, 0, inputs, outputs, ends, rank, experts=128)


def _grouped_product_spec(
    name: str,
    shape: tuple[int, int],
    kind: PackedKind | None,
    dtype: str,
    activation: grouped_product.Activation | None,
    rows: int,
    arch: int,
    rank: int = 0,
) -> BuildSpec:
    gated = activation is not None
    constants, _ = grouped_product._constants(kind or shape[1], False, activation, gated, rows, _TYPES[dtype], arch)
    words, scales = (f"*{dtype}:16", f"*{dtype}:16") if kind is None else ("*i32:16", "*fp32:16")
    if kind is not None and kind.scale != "float32":
        scales = "*i32:16"
    pointers = f"*{dtype}:16, *i32:16, *i32:16, *i32:16, {words}, {scales}, {scales}, *fp32:16, *i32:16, *fp32:16"
    pointers += f", *{dtype}:16, *{dtype}:16, *i32:16, *{dtype}:16, *{dtype}:16"
    sizes = ", ".join(["i32:16"] * 4)
    constants |= expert_adapters.expand_constants(_adapted(*shape, gated, rank) if rank else None)
    summed = constants["EXACT"] and constants["GROUP"] > 0 and constants["SCALE"] == "float32"
    return BuildSpec(
        name=f"grouped_{name}{f'_rank{rank}' if rank else ''}-{rows}",
        kernel=grouped_product._grouped,
        signature=f"{pointers}, i32, {sizes}, i32, i32:16, i32:16, fp32, fp32, i32, i32:16, i32:16",
        constants={"GATHERED": True, "SCATTERED": True, "HAS_BIAS": "oss" in name, **constants},
        max_spill_bytes=GROUP_SUM_SPILL_BYTES if summed and rows == dense_gemm.ROW_TILES[-1] else 0,
        architectures=(arch,),
    )


def embedding_specs() -> list[BuildSpec]:
    """List embeddings of Llama-like models."""
    signature = "*i32:16, *i32, *bf16:16, *i32:16, *bf16:16, *bf16:16, i32:16, fp32"
    return [
        BuildSpec(
            name=name,
            kernel=embedding._embed,
            signature=signature,
            constants={"FIRST": first, "TOKENS": first, "SCALED": False, "POSITIONS": added, **embedding._tile(90)},
            max_registers=64,
        )
        for name, first, added in (("embed", 0, False), ("embed_rank", 64128, False), ("embed_positions", 0, True))
    ]


def gated_specs() -> list[BuildSpec]:
    """List gated activations."""
    return [
        BuildSpec(
            name=f"gated-{activation}-{dtype}" + "-apart" * apart,
            kernel=gated._gated,
            signature=f"*{dtype}:16, *{dtype}:16, *{dtype}:16, i32:16, i32:16, i32, fp32, fp32",
            constants=gated._constants(activation, activation in ("silu", "gelu_tanh"), 90, apart=apart),
            max_registers=64,
        )
        for activation in gated.ACTIVATIONS
        for dtype in ("bf16", "fp16", "fp32")
        for apart in (False, True)[: 2 if activation == "gelu_tanh" else 1]
    ]


def norms_specs() -> list[BuildSpec]:
    """List Llama 3 8B's rows, the longest, queries of an OLMo 2, and small ones."""
    return [
        _norms_spec(norms._rms_norm, 4096, "bf16", {"WIDE": False}, max_registers=96),
        _norms_spec(norms._rms_norm, 2048, "bf16", {"WIDE": True}, max_registers=96),
        _norms_spec(norms._rms_norm, 2048, "bf16", {"WIDE": True, "CENTERED": True, "BIAS": True}, max_registers=96),
        _norms_spec(norms._rms_norm, 576, "fp16", {"WIDE": False}, max_registers=96),
        _norms_spec(norms._add_rms_norm, 4096, "bf16", {"WIDE": False, "POST": False, "NORM": True}, max_registers=96),
        _norms_spec(norms._add_rms_norm, 4096, "fp32", {"WIDE": False, "POST": False, "NORM": True}, max_registers=128),
        _norms_spec(norms._add_rms_norm, 4608, "bf16", {"WIDE": True, "POST": True, "NORM": True}, max_registers=128),
        _norms_spec(norms._add_rms_norm, 4096, "bf16", {"WIDE": True, "POST": True, "NORM": False}, max_registers=96),
        _norms_spec(
            norms._add_rms_norm,
            5376,
            "bf16",
            {"WIDE": True, "POST": True, "FACTOR": True, "NORM": True},
            max_registers=128,
        ),
        _norms_spec(
            norms._add_rms_norm,
            4096,
            "bf16",
            {"WIDE": True, "POST": False, "NORM": True, "CENTERED": True, "BIAS": True},
            max_registers=96,
        ),
        _norms_spec(
            norms._add_rms_norm, 16384, "bf16", {"WIDE": False, "POST": False, "NORM": True}, max_registers=128
        ),
        _norms_spec(norms._add_rms_norm, 16384, "bf16", {"WIDE": True, "POST": True, "NORM": True}, max_registers=128),
        _norms_spec(norms._add_rms_norm, 576, "bf16", {"WIDE": False, "POST": False, "NORM": True}, max_registers=96),
        *(
            _norms_spec(
                norms._add_rms_norm,
                columns,
                "bf16",
                {"WIDE": False, "POST": False, "NORM": True, "EXPERTS": experts, "BESIDE": beside},
                max_registers=160,
            )
            for columns, experts, beside in ((2048, 8, False), (2880, 4, False), (7168, 9, False), (7168, 9, True))
        ),
    ]


def _norms_spec(kernel: Any, columns: int, dtype: str, options: dict[str, int], max_registers: int) -> BuildSpec:
    row, weight = f"*{dtype}:16", "*fp32:16" if options["WIDE"] else f"*{dtype}:16"
    options = {"CENTERED": False, "BIAS": False, **options}
    bias = "*fp32:16" if options["BIAS"] else row
    types = [row, weight, bias, row, "i32", "i32:16", "i32:16", "i32:16", "fp32"]
    if kernel is norms._add_rms_norm:
        options = {"EXPERTS": 0, "BESIDE": False, "FACTOR": False, **options}
        pairs = ["*fp32:16", "*i32:16"] if options["EXPERTS"] else [row, row]
        types = [row, row, *pairs, row, weight, weight, bias, row, row, "i32", "i32:16", "fp32", "fp32"]
    flags = "-".join(name.lower() for name, on in options.items() if on)
    return BuildSpec(
        name=f"{kernel.__name__[1:]}-{columns}-{dtype}" + (f"-{flags}" if flags else ""),
        kernel=kernel,
        signature=", ".join(types),
        constants={**options, **norms._row_tile(columns, 90)},
        max_registers=max_registers,
    )


def gpu_sampling_specs() -> list[BuildSpec]:
    """List vocabularies of 128,256 and of 262,144 tokens."""
    slice_groups = tuned("sample_survey", 90)["slice_groups"]
    specs = []
    for name, kind, groups, sizes in (
        ("fp32", "fp32", 1002, "i32:16, i32:16, i32"),
        ("fp32_wide", "fp32", 2048, "i32:16, i32:16, i32:16"),
        ("bf16", "bf16", 1002, "i32:16, i32:16, i32"),
    ):
        found = f"*{kind}:16, *i32:16, *i32:16, *fp32:16, *fp32:16"
        specs += [
            BuildSpec(
                name=f"sample_survey_{name}",
                kernel=gpu_sampling._survey,
                signature=f"{found}, {sizes}",
                constants=gpu_sampling._survey_constants(90, slice_groups),
                max_registers=128,
            ),
            BuildSpec(
                name=f"sample_settle_{name}",
                kernel=gpu_sampling._settle,
                signature=f"{found}, *i32:16, *fp32:16, *fp32:16, *i32:16, {sizes}",
                constants=gpu_sampling._settle_constants(90, groups // slice_groups + 1, groups),
            ),
        ]
    return specs


def sampling_edits_specs() -> list[BuildSpec]:
    """List edits of single logits: biases, penalties, banned ids."""
    signature = "*fp32:16, *i32:16, i32, i32, i32:16"
    return [
        BuildSpec(
            name="sample_edits",
            kernel=sampling_edits._edit,
            signature=signature,
            constants=sampling_edits._constants(90),
            max_registers=64,
        )
    ]


def sampling_masks_specs() -> list[BuildSpec]:
    """List grammar masks."""
    signature = "*fp32:16, *i32:16, *i32:16, i32, i32:16, i32"
    return [
        BuildSpec(
            name="sample_masks",
            kernel=sampling_masks._mask,
            signature=signature,
            constants=sampling_masks._constants(90),
            max_registers=64,
        )
    ]


def state_specs() -> list[BuildSpec]:
    """List convolutions of LFM2 and Qwen3-Next, delta rules of Qwen3-Next and Kimi-Linear, and state spaces of
    Granite, Nemotron-H and Falcon-H1."""
    specs = [
        _convolution("lfm2-bf16", "bf16", 3, gated=True, bias=False),
        _convolution("lfm2-fp32", "fp32", 3, gated=True, bias=True),
        _convolution("mixed-bf16", "bf16", 4, gated=False, bias=True),
        _convolution("mixed-fp32", "fp32", 4, gated=False, bias=False),
        _convolution("chosen-bf16", "bf16", 4, gated=False, bias=True, chosen=True),
        BuildSpec(
            name="prepare_rows-128",
            kernel=gpu_delta_rule._prepare,
            signature="*bf16:16, *bf16:16, *fp32:16, *fp32:16, *fp32:16, *fp32:16, fp32",
            constants=gpu_delta_rule.prepare_constants(_QWEN, _ARCH),
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
        # Both kernels have equally many arguments of each type.
        arguments = [f"*{dtype}:16", *["*fp32:16"] * 4, *["*i32:16"] * 7]
        constants, _ = gpu_delta_rule.solve_constants(delta, _ARCH)
        solve = _tile(f"delta_solve-{name}", gpu_delta_rule._solve, arguments, constants)
        specs.append(replace(solve, max_spill_bytes=EXACT_KEYS_SPILL_BYTES if dtype == "fp32" else 0))
        constants, _ = gpu_delta_rule.delta_constants(delta, dtype == "fp32", _ARCH)
        specs.append(_tile(f"delta_rule-{name}", gpu_delta_rule._delta_rule, arguments, constants))
    for name, dtype, space in (
        ("granite-bf16", "bf16", _GRANITE),
        ("nemotron-bf16", "bf16", _NEMOTRON),
        ("falcon-bf16", "bf16", _FALCON),
        ("granite-fp32", "fp32", _GRANITE),
        ("falcon-fp32", "fp32", _FALCON),
    ):
        constants, _ = gpu_state_spaces.space_constants(space, dtype == "fp32", _ARCH)
        rows = [f"*{dtype}:16", f"*{dtype}:16", *["*fp32:16"] * 5]
        arguments = [*rows, *["*i32:16"] * 6, "i32:16"]
        specs.append(_tile(f"state_space-{name}", gpu_state_spaces._state_space, arguments, constants))
    scan = gpu_selective_scan.scan_constants(_JAMBA)
    for dtype in ("bf16", "fp32"):
        arguments = [*[f"*{dtype}:16"] * 4, *["*fp32:16"] * 4, *["*i32:16"] * 4, "i32:16"]
        specs.append(_tile(f"selective_scan-jamba-{dtype}", gpu_selective_scan._selective_scan, arguments, scan))
    return [*specs, *_gates()]


def _convolution(name: str, dtype: str, taps: int, *, gated: bool, bias: bool, chosen: bool = False) -> BuildSpec:
    pointers = f"*{dtype}:16, *fp32:16, *fp32:16, *{dtype}:16, *fp32:16, " + ", ".join(["*i32:16"] * 5)
    return BuildSpec(
        name=f"convolve-{name}",
        kernel=gpu_convolutions._convolve,
        signature=f"{pointers}, i32:16, i32:16, i32:16",
        constants={**_PLACES, **gpu_convolutions.convolution_constants(taps, gated, bias, chosen, _ARCH)},
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
    flags = {"OWN_WEIGHTS": False, "GATE_FIRST": False, "NORMED": True, "SIGMOID": False, "SUMMED": False}
    first = flags | {"OWN_WEIGHTS": True, "GATE_FIRST": True}
    uses = (
        ("norm_gated-128-bf16", 128, flags),
        ("norm_gated-128-bf16-sigmoid", 128, flags | {"SIGMOID": True}),
        ("norm_gated-8192-bf16-first", 8192, first),
        ("norm_gated-16384-bf16-first", 16384, first),
        # One of two ranks that share the only group of Granite 4.0 H Small.
        ("norm_gated-4096-bf16-shared", 4096, first | {"SUMMED": True}),
    )
    squares = BuildSpec(
        name="group_squares-4096-bf16",
        kernel=gpu_gates._group_squares,
        signature="*fp32:16, *bf16:16, *fp32:16, i32:16, i32:16, i32, i32:16",
        constants={"COLUMNS": 1, "GATE_FIRST": True, **gpu_gates.gate_constants(4096, _ARCH)},
        max_registers=128,
    )
    norms = [
        BuildSpec(
            name=name,
            kernel=gpu_gates._norm_gated,
            signature="*fp32:16, *bf16:16, *fp32:16, *bf16:16, *fp32:16, i32, i32:16, i32:16, i32, fp32",
            constants={**constants, **gpu_gates.gate_constants(width, _ARCH)},
            max_registers=128,
        )
        for name, width, constants in uses
    ]
    return [*norms, squares]


def build_specs() -> list[BuildSpec]:
    kernels = (
        kv_write_specs,
        latent_attention_specs,
        latent_write_specs,
        paged_attention_specs,
        overlapped_attention_specs,
        blocks_specs,
        low_rank_product_specs,
        dense_gemm_specs,
        fp8_product_specs,
        head_product_specs,
        quantized_product_specs,
        expert_specs,
        grouped_product_specs,
        expert_adapter_specs,
        embedding_specs,
        gated_specs,
        norms_specs,
        gpu_sampling_specs,
        sampling_edits_specs,
        sampling_masks_specs,
        state_specs,
    )
    # With dependent launches, which add code to kernels.
    with trying("dependent_launch", 90, {"on": 1}):
        return [spec for specs in kernels for spec in specs()]
