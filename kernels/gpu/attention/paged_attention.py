"""Attention of ragged batches over the paged pool: the interface to the engine.

    plan (host, once per step) --record, one copy--> device --attend (each layer)--> decodes; chunks; merge

Decodes and chunks are two launches, one after the other, each with tiles and programs of its own. One launch for both
would have to use the tiles of the longest query: in vLLM's Triton kernel one chunk in the batch keeps every decode's
context from being split, and a few long decodes then occupy only a few processors.

``attend`` neither allocates nor waits, and its grids depend on the limits alone, so that a graph can capture it and
replay it over another record at the same address. A graph without chunks serves all steps without chunks.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import triton

from pillion.kernels.gpu.attention.attention_kernel import _attend, _merge
from pillion.kernels.gpu.attention.gpu_attention_plan import GpuAttentionPlan, GpuAttentionPlanner, Tiling
from pillion.kernels.gpu.build import ARCHITECTURES, BuildSpec
from pillion.kernels.gpu.launch import arch_of, check, check_tensor, interpreting, processors_of
from pillion.kernels.gpu.tuned import tuned
from pillion.kernels.torch.reference import RaggedBatch

PlainOrFloat8 = Literal["plain", "fp8_e4m3"]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# A float8 piece has a float32 scale for each row.
SCALE_BYTES = 4
# The first architecture that converts e4m3 by an instruction.
NATIVE_FP8_ARCH = 89
# Rows of a decode tile: least for tensor cores, and most with which attention is still bound by memory.
LEAST_DECODE_ROWS, MOST_DECODE_ROWS = 16, 64
LEAST_HEAD_DIM, MOST_HEAD_DIM = 16, 256
# A chunk's tile of this width fills all registers; a few values that are not used in the loops over keys are spilled.
WIDE_HEAD_DIM, WIDE_SPILL_BYTES = 256, 32


def padded_head_dim(head_dim: int) -> int:
    """Returns the power of two that a head fills in registers."""
    return int(triton.next_power_of_2(head_dim))


def decode_tile_rows(rows: int, width: int) -> int:
    """Returns a decode tile's rows for ``rows`` query rows per sequence and KV head, and heads padded to ``width``.

    With heads of 256, registers suffice for 32 rows.
    """
    most = MOST_DECODE_ROWS if width < WIDE_HEAD_DIM else MOST_DECODE_ROWS // 2
    return min(max(int(triton.next_power_of_2(rows)), LEAST_DECODE_ROWS), most)


def piece_size(kv: PlainOrFloat8, block_size: int, head_dim: int) -> int:
    """Returns the size of a (layer, K or V, head) piece: elements of the pool's type, or bytes for float8."""
    return block_size * (head_dim + SCALE_BYTES if kv == "fp8_e4m3" else head_dim)


class PagedAttention:
    """Attention over one pool for all layers of a model. It is called from the step loop's thread."""

    def __init__(
        self,
        pool: torch.Tensor,
        *,
        dtype: torch.dtype,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        num_layers: int,
        scale: float,
        max_tokens: int,
        max_seqs: int,
        max_context_blocks: int,
        kv: PlainOrFloat8 = "plain",
        softcap: float = 0.0,
        windows: tuple[int, ...] = (0,),
        decode_rows: int = 1,
    ) -> None:
        """Allocates the partial results. Raises Internal for a pool or numbers that do not fit.

        Args:
            pool: contiguous [slots, num_layers, 2, num_kv_heads, block_size, head_dim] of ``dtype``, or, for float8,
                uint8 [slots, num_layers, 2, num_kv_heads, block_size * (head_dim + 4)]: a piece's e4m3 rows, then a
                float32 scale for each.
            dtype: of queries and results.
            scale: factor of the scores; positive.
            softcap: scaled scores become softcap * tanh(score / softcap); 0: no cap.
            windows: the distinct sliding windows of the layers; 0: full attention.
            max_tokens, max_seqs: limits of a step. max_context_blocks: limit of a sequence.
            decode_rows: most tokens of a decode (more than one if drafts are verified).
        """
        check(num_heads % num_kv_heads == 0, f"{num_heads} heads over {num_kv_heads} KV heads")
        check(LEAST_HEAD_DIM <= head_dim <= MOST_HEAD_DIM and head_dim % 16 == 0, f"heads of {head_dim}")
        check(scale > 0, f"scores are scaled by {scale}")
        check(dtype in DTYPES, f"queries are of {dtype}")
        piece = (block_size, head_dim) if kv == "plain" else (piece_size(kv, block_size, head_dim),)
        shape = (None, num_layers, 2, num_kv_heads, *piece)
        check_tensor("pool", pool, shape, dtype if kv == "plain" else torch.uint8)
        self._pool, self._dtype, self._device = pool, dtype, pool.device
        self._heads, self._kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self._layers, self._block_size, self._kv = num_layers, block_size, kv
        self._scale, self._softcap = scale, softcap
        self._scales = pool.view(-1).view(torch.float32) if kv == "fp8_e4m3" else pool
        group, arch, width = num_heads // num_kv_heads, arch_of(self._device), padded_head_dim(head_dim)
        facts = {"head_dim": width, "kv": kv, "bytes": dtype.itemsize}
        self._decode, self._chunk = tuned("attention_decode", arch, **facts), tuned("attention_chunk", arch, **facts)
        self._merge = tuned("attention_merge", arch)
        self._decode["rows"] = decode_tile_rows(group * decode_rows, width)
        processors = processors_of(self._device)
        self._merge_programs = self._merge["programs"] * processors
        self._native_fp8 = arch >= NATIVE_FP8_ARCH and not interpreting()
        self.planner = GpuAttentionPlanner(
            kv_heads=num_kv_heads,
            group=group,
            block_size=block_size,
            decode=_tiling(self._decode, processors),
            chunk=_tiling(self._chunk, processors),
            windows=windows,
            max_tokens=max_tokens,
            max_seqs=max_seqs,
            max_context_blocks=max_context_blocks,
        )
        rows = self.planner.partial_rows
        self._partials = torch.empty((rows, width), dtype=torch.float32, device=self._device)
        self._partial_logs = torch.empty(rows, dtype=torch.float32, device=self._device)

    @property
    def max_record_words(self) -> int:
        """Most int32 words of a step's record: the size of its device buffer."""
        return self.planner.max_record_words

    def plan(self, batch: RaggedBatch) -> GpuAttentionPlan:
        """Plans a step. The plan's record must be in the device's buffer before ``attend`` runs.

        Raises Internal for a batch beyond the limits.
        """
        return self.planner.plan(batch)

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        out: torch.Tensor,
        record: torch.Tensor,
        *,
        window: int = 0,
        with_chunks: bool,
    ) -> None:
        """Writes attention of ``queries`` into ``out``; rows beyond the batch stay as they are.

        Args:
            queries: [T, heads, head_dim], rows with any stride, such as a slice of a fused projection.
            out: contiguous [T, heads * head_dim].
            record: int32 on the device, beginning with the words of the plan's record.
            window: one of the ``windows``.
            with_chunks: the plan's field, or True, which is slower for a step without chunks.

        Raises Internal for misshapen tensors.
        """
        self._check(layer, queries, out, record, window)
        planner = self.planner
        self._launch(self._decode, planner.starts_at(window, False), layer, queries, out, record, window)
        if with_chunks:
            self._launch(self._chunk, planner.starts_at(window, True), layer, queries, out, record, window)
        _merge[(self._merge_programs,)](
            record,
            planner.counts_at(window),
            self._partials,
            self._partial_logs,
            out,
            KV_HEADS=self._kv_heads,
            GROUP=self._heads // self._kv_heads,
            HEAD_DIM=self._head_dim,
            BLOCK_D=padded_head_dim(self._head_dim),
            DECODE_M=self._decode["rows"],
            CHUNK_M=self._chunk["rows"],
            PARTS=self._merge["parts"],
            num_warps=self._merge["num_warps"],
        )

    def _launch(
        self,
        use: dict[str, int],
        starts_at: int,
        layer: int,
        queries: torch.Tensor,
        out: torch.Tensor,
        record: torch.Tensor,
        window: int,
    ) -> None:
        slot_stride = self._pool.stride(0)
        layer_offset = layer * self._pool.stride(1)
        tiling = self.planner.decode if use is self._decode else self.planner.chunk
        _attend[(tiling.programs,)](
            queries,
            self._pool,
            self._scales,
            record,
            starts_at,
            out,
            self._partials,
            self._partial_logs,
            queries.stride(0),
            slot_stride,
            layer_offset,
            slot_stride // SCALE_BYTES,
            layer_offset // SCALE_BYTES,
            self._scale if self._softcap else self._scale * math.log2(math.e),
            self._softcap,
            KV_HEADS=self._kv_heads,
            GROUP=self._heads // self._kv_heads,
            HEAD_DIM=self._head_dim,
            BLOCK_D=padded_head_dim(self._head_dim),
            BLOCK_SIZE=self._block_size,
            BLOCK_M=use["rows"],
            BLOCK_N=use["keys"],
            WINDOW=window,
            SOFTCAP=self._softcap != 0,
            FP8=self._kv == "fp8_e4m3",
            NATIVE_FP8=self._native_fp8,
            EDGES=use is self._chunk,
            num_warps=use["num_warps"],
            num_stages=use["num_stages"],
        )

    def _check(self, layer: int, queries: torch.Tensor, out: torch.Tensor, record: torch.Tensor, window: int) -> None:
        shape, heads, width = tuple(queries.shape), self._heads, self._head_dim
        check(0 <= layer < self._layers, f"layer {layer} of {self._layers}")
        check(window in self.planner.windows, f"nothing is planned for a window of {window}")
        check(shape[1:] == (heads, width), f"queries are {list(shape)}, not [T, {heads}, {width}]")
        check(queries.stride()[1:] == (width, 1), "a row of queries is not contiguous")
        check(queries.dtype == self._dtype and queries.device == self._device, f"queries are of {queries.dtype}")
        check_tensor("out", out, (shape[0], heads * width), self._dtype, self._device)
        check_tensor("record", record, (None,), torch.int32, self._device)


def _tiling(use: dict[str, int], processors: int) -> Tiling:
    return Tiling(use["rows"], use["keys"], use["programs"] * processors, use["unit_tiles"])


def build_specs() -> list[BuildSpec]:
    """Lists what is built ahead of time: Llama 3 8B, and what differs in other models."""
    llama = {"KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": 128, "BLOCK_SIZE": 16, "WINDOW": 0, "SOFTCAP": False}
    cases: list[tuple[str, str, PlainOrFloat8, dict[str, Any]]] = [
        ("", "bf16", "plain", {}),
        ("_fp16", "fp16", "plain", {}),
        ("_fp8", "bf16", "fp8_e4m3", {}),
        ("_fp8_fp16", "fp16", "fp8_e4m3", {}),
        ("_fp32", "fp32", "plain", {}),
        ("_qwen_28_heads", "bf16", "plain", {"GROUP": 7, "KV_HEADS": 4, "BLOCK_SIZE": 64}),
        ("_64", "bf16", "plain", {"HEAD_DIM": 64}),
        ("_64_fp8", "bf16", "fp8_e4m3", {"HEAD_DIM": 64}),
        ("_96", "bf16", "plain", {"HEAD_DIM": 96, "GROUP": 1, "KV_HEADS": 32}),
        ("_256", "bf16", "plain", {"HEAD_DIM": 256}),
        ("_256_fp8", "bf16", "fp8_e4m3", {"HEAD_DIM": 256}),
        ("_wide_group", "bf16", "plain", {"GROUP": 28, "KV_HEADS": 2}),
        ("_window_softcap", "bf16", "plain", {"WINDOW": 4096, "SOFTCAP": True}),
        ("_256_window_softcap", "bf16", "plain", {"HEAD_DIM": 256, "GROUP": 2, "WINDOW": 4096, "SOFTCAP": True}),
    ]
    specs = [
        _spec(kernel, name, arch, dtype, kv, {**llama, **other})
        for name, dtype, kv, other in cases
        for kernel in ("attention_decode", "attention_chunk")
        for arch in ARCHITECTURES
    ]
    return [*specs, *(_merge_spec(arch) for arch in ARCHITECTURES)]


def _spec(kernel: str, name: str, arch: int, dtype: str, kv: PlainOrFloat8, shape: dict[str, Any]) -> BuildSpec:
    width = padded_head_dim(shape["HEAD_DIM"])
    fp8, chunk = kv == "fp8_e4m3", kernel == "attention_chunk"
    use = tuned(kernel, arch, head_dim=width, kv=kv, bytes=4 if dtype == "fp32" else 2)
    pointers = {
        "queries": f"*{dtype}",
        "pool": "*u8" if fp8 else f"*{dtype}",
        "scales": "*fp32" if fp8 else f"*{dtype}",
        "record": "*i32",
        "out": f"*{dtype}",
        "partials": "*fp32",
        "partial_logs": "*fp32",
    }
    strides = ("query_stride", "slot_stride", "layer_offset", "scale_slot_stride", "scale_layer_offset")
    return BuildSpec(
        name=f"{kernel}{name}",
        kernel=_attend,
        signature={
            **pointers,
            **dict.fromkeys(("starts_at", *strides), "i32"),
            "score_scale": "fp32",
            "softcap": "fp32",
        },
        constants={
            **shape,
            "BLOCK_D": width,
            "BLOCK_M": use["rows"] if chunk else decode_tile_rows(shape["GROUP"], width),
            "BLOCK_N": use["keys"],
            "FP8": fp8,
            "NATIVE_FP8": fp8 and arch >= NATIVE_FP8_ARCH,
            "EDGES": chunk,
        },
        aligned=(*pointers, *strides[:3]),
        num_warps=use["num_warps"],
        num_stages=use["num_stages"],
        max_spill_bytes=WIDE_SPILL_BYTES if chunk and width == WIDE_HEAD_DIM else 0,
        architectures=(arch,),
    )


def _merge_spec(arch: int) -> BuildSpec:
    use = tuned("attention_merge", arch)
    pointers = {"record": "*i32", "partials": "*fp32", "partial_logs": "*fp32", "out": "*bf16"}
    constants = {"KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": 128, "BLOCK_D": 128, "DECODE_M": 16, "CHUNK_M": 128}
    return BuildSpec(
        name="attention_merge",
        kernel=_merge,
        signature={**pointers, "counts_at": "i32"},
        constants={**constants, "PARTS": use["parts"]},
        aligned=tuple(pointers),
        num_warps=use["num_warps"],
        max_registers=128,
        architectures=(arch,),
    )
