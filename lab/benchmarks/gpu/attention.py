"""Paged attention: decodes against the copy bandwidth, chunks against products and FlashAttention, and a mix."""

from __future__ import annotations

import torch

from lab.benchmarks.gpu.bench import Bench, Row, Times, rotations, spread
from lab.benchmarks.gpu.pools import Attended, AttentionPool, check_near, verify_rows
from lab.benchmarks.gpu.search import trying
from lab.benchmarks.gpu.shapes import BatchEntry, LlamaShape, decodes, shape_of
from lab.benchmarks.gpu.tunables import TUNABLES
from pillion.kernels.gpu.attention.overlapped_attention import ARCH as OVERLAPPED_ARCH
from pillion.kernels.gpu.attention.paged_attention import PlainOrFloat8
from pillion.kernels.gpu.launch import arch_of
from pillion.kernels.gpu.tuned import tuned

# Side of square matrices whose product has the device's peak rate.
PRODUCT_SIDE = 8192
# Two kernels in a row have two tails of idle multiprocessors; one launch of both should not cost more.
MIXED_TARGET = "<= 1.1"


def run(bench: Bench) -> None:
    """Measure all rows of the section."""
    shape = shape_of(bench.smoke)
    small = bench.smoke
    block_sizes = (16,) if small else (16, 64, 128)
    cases = [(2, 20, "")] if small else [(64, 4096, ">= 0.85"), (1, 32768, ">= 0.70")]
    kinds: tuple[PlainOrFloat8, ...] = ("plain", "fp8_e4m3")
    for batch, context, target in cases:
        for kv in kinds:
            for block_size in block_sizes:
                name = f"decode attention, {batch} x {context}, blocks of {block_size}, {_kind(kv)}"
                _attempt_decode(bench, shape, name, decodes(batch, context), block_size, kv, target)
    side = 64 if small else PRODUCT_SIDE
    rate = bench.product_rate(side, side, side)
    chunk, prefix = (8, 16) if small else (2048, 8192)
    for block_size in block_sizes:
        name = f"chunk of {chunk} behind {prefix}, blocks of {block_size}"
        bench.attempt(name, lambda size=block_size, name=name: _chunk(bench, shape, name, chunk, prefix, size, rate))  # type: ignore[misc]
    bench.attempt("mixed batch", lambda: _mixed(bench, shape))
    bench.attempt("attention in parts", lambda: _in_parts(bench, shape))


def _kind(kv: PlainOrFloat8) -> str:
    return "bfloat16" if kv == "plain" else "fp8"


def _attempt_decode(
    bench: Bench,
    shape: LlamaShape,
    name: str,
    entries: list[BatchEntry],
    block_size: int,
    kv: PlainOrFloat8,
    target: str,
) -> None:
    def measure() -> None:
        context = entries[0].prefix + 1
        tokens = len(entries) * -(-context // block_size) * block_size
        layers = rotations(tokens * shape.kv_bytes, bench.smoke, most=8)
        pool = AttentionPool(bench, shape, block_size=block_size, tokens=tokens, layers=layers, kv=kv)
        attended = pool.attend(entries)
        verify_rows(pool, attended)
        times = bench.time(attended.calls)
        # The target is for bfloat16; float8 halves the bytes, but not the latencies.
        bench.report_bytes(name, times, attended.read_bytes, target if kv == "plain" else "")

    bench.attempt(name, measure)


def _chunk(bench: Bench, shape: LlamaShape, name: str, chunk: int, prefix: int, block_size: int, rate: float) -> None:
    pool = AttentionPool(bench, shape, block_size=block_size, tokens=chunk + prefix, layers=2)
    entries = [BatchEntry(chunk, prefix)]
    attended = pool.attend(entries)
    times = bench.time(attended.calls)
    bench.report_flops(name, times, attended.flops(), rate, ">= 0.60")
    _overlapped_chunk(bench, pool, entries, name, rate)
    theirs, gather, off = _sdpa(bench, pool, attended)
    more = {**spread(theirs), "gather_us": gather.median_s * 1e6, "difference": off}
    share = theirs.median_s / times.median_s
    bench.report(
        Row(f"{name}, torch SDPA on gathered KV", theirs.median_s * 1e6, "us", share, "our time", ">= 1.0", more=more)
    )
    both = theirs.median_s + gather.median_s
    bench.report(
        Row(f"{name}, torch SDPA and its gather", both * 1e6, "us", both / times.median_s, "our time", more=more)
    )


def _overlapped_chunk(bench: Bench, pool: AttentionPool, entries: list[BatchEntry], name: str, rate: float) -> None:
    """Measure the kernel that overlaps softmax with products on the same pool, if available."""
    tunable, arch = TUNABLES["attention_chunk"], arch_of(bench.device)
    if bench.smoke or arch != OVERLAPPED_ARCH:
        return
    use = next(tunable.candidates(tuned(tunable.kernel, arch, **tunable.facts)))
    with trying(tunable.kernel, arch, use):
        attended = pool.attend(entries)
    verify_rows(pool, attended)
    bench.report_flops(f"{name}, overlapped", bench.time(attended.calls), attended.flops(), rate, ">= 0.65")


def _sdpa(bench: Bench, pool: AttentionPool, attended: Attended) -> tuple[Times, Times, float]:
    """Return the times of torch's attention and of gathering its K and V, and the relative difference of ours."""
    from torch.nn.attention.bias import causal_lower_right

    tokens, heads, head_dim = attended.queries.shape
    gather = pool.gathering(attended, 0)
    keys, values = gather()
    group = heads // keys.shape[1]
    # Repeat heads first, since not every build's fused kernel supports grouped ones.
    keys, values = (each.repeat_interleave(group, 1).contiguous() for each in (keys, values))
    queries = attended.queries.permute(1, 0, 2)[None].contiguous()
    mask = causal_lower_right(tokens, keys.shape[2])

    def attend() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)

    found = attend()[0].permute(1, 0, 2).reshape(tokens, heads * head_dim)
    attended.calls[0]()
    off = check_near(attended.out, found)
    return bench.time([attend]), bench.time([gather]), off


def _in_parts(bench: Bench, shape: LlamaShape) -> None:
    """Measure attention in parts of fixed keys (--batch-invariant) against attention with free cuts."""
    streams, context, chunk = (2, 20, 8) if bench.smoke else (64, 4096, 2048)
    cases = (decodes(streams, context), decodes(1, context), [BatchEntry(chunk, 4 * context - chunk)])
    tokens = (streams + 4) * -(-context // 16) * 16
    pool = AttentionPool(bench, shape, block_size=16, tokens=tokens, layers=2)
    for name, entries in zip((f"{streams} decodes", "a decode", f"a chunk of {chunk}"), cases, strict=True):
        attended = pool.attend(entries, invariant=True)
        verify_rows(pool, attended)
        anywhere, parts = (bench.time(each.calls).median_s for each in (pool.attend(entries), attended))
        bench.report(Row(f"attention in parts, {name}", parts * 1e6, "us", parts / anywhere, "cut anywhere"))


def _mixed(bench: Bench, shape: LlamaShape) -> None:
    """Measure decodes and a chunk in one launch, against both alone."""
    streams, context, chunk = (2, 20, 8) if bench.smoke else (63, 4096, 512)
    block_size = 16
    tokens = (streams + 1) * -(-context // block_size) * block_size
    pool = AttentionPool(bench, shape, block_size=block_size, tokens=tokens, layers=2)
    alone, extra = decodes(streams, context), [BatchEntry(chunk, context - chunk)]
    times = {
        name: bench.time(pool.attend(entries).calls)
        for name, entries in (("decodes", alone), ("chunk", extra), ("mixed", alone + extra))
    }
    both = times["decodes"].median_s + times["chunk"].median_s
    more = {f"{name}_us": each.median_s * 1e6 for name, each in times.items()}
    name = f"mixed batch, {streams} x {context} and a chunk of {chunk}"
    mixed = times["mixed"].median_s
    bench.report(Row(name, mixed * 1e6, "us", mixed / both, "both alone", MIXED_TARGET, more=more))
