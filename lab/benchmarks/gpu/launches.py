"""The launches of sections with the constants in use, without measuring, so that they can be compiled ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from lab.benchmarks.gpu.bench import Bench, Call
from lab.benchmarks.gpu.calls import CASES, KernelCase
from lab.benchmarks.gpu.grouped import CHUNK, SHAPES, expert_stacks, grouped_case
from lab.benchmarks.gpu.grouped import FEW_ROWS as FEW_EXPERT_ROWS
from lab.benchmarks.gpu.pools import AttentionPool
from lab.benchmarks.gpu.products import (
    ADAPTERS,
    FEW_ROWS,
    KINDS,
    MANY_ROWS,
    adapters_case,
    fp8_case,
    plain_case,
    product_case,
)
from lab.benchmarks.gpu.search import trying
from lab.benchmarks.gpu.shapes import LLAMA_8B, BatchEntry, decodes
from lab.benchmarks.gpu.states import CONTEXT, VERIFIED_ROWS, layer_kernels
from lab.benchmarks.gpu.tunables import TUNABLES
from pillion.kernels.gpu.attention.paged_attention import PlainOrFloat8
from pillion.kernels.gpu.launch import arch_of
from pillion.kernels.gpu.tuned import tuned

Launch = Callable[[Bench], None]
ROWS = (*FEW_ROWS, *MANY_ROWS)
BLOCK_SIZES = (16, 64, 128)


def section_launches() -> dict[str, Launch]:
    """Return functions that launch a section's kernels, by names that begin with the section's."""
    found: dict[str, Launch] = {f"small: {name}": partial(_launch, partial(_small, name)) for name in CASES}
    for product, size in LLAMA_8B.products.items():
        for kind in ("plain", *KINDS, "fp8 by fp8", "adapters"):
            found[f"products: {kind}, {product}"] = partial(_launch, partial(_products, kind, *size))
    found |= {f"grouped: {name}": partial(_launch, partial(_grouped, name)) for name in SHAPES}
    kinds: dict[str, PlainOrFloat8] = {"bfloat16": "plain", "fp8": "fp8_e4m3"}
    for name, kv in kinds.items():
        found |= {f"attention: {name}, blocks of {size}": partial(_attend, kv, size) for size in BLOCK_SIZES}
    found["states: a layer"] = _states
    return found


def _launch(cases: Callable[[Bench], Iterable[KernelCase]], bench: Bench) -> None:
    for case in cases(bench):
        case.calls[0]()


def _small(name: str, bench: Bench) -> Iterable[KernelCase]:
    return (CASES[name](bench, LLAMA_8B, rows) for rows in CASES[name].rows)


def _products(kind: str, inputs: int, outputs: int, bench: Bench) -> Iterable[KernelCase]:
    for rows in ROWS:
        if kind == "plain":
            yield plain_case(bench, inputs, outputs, rows)[0]
        elif kind == "adapters":
            yield adapters_case(bench, inputs, outputs, rows)
        elif kind == "fp8 by fp8":
            yield from (fp8_case(bench, inputs, outputs, rows, in_blocks=blocks) for blocks in (False, True))
        else:
            yield product_case(bench, kind, inputs, outputs, rows)


def _grouped(name: str, bench: Bench) -> Iterable[KernelCase]:
    shape = SHAPES[name]
    stacks = expert_stacks(shape, bench.device, bench.smoke)
    for rows in (*FEW_EXPERT_ROWS, CHUNK):
        for adapters in (0, ADAPTERS) if shape.kind == "bf16" else (0,):
            yield grouped_case(bench, shape, rows, stacks, adapters)


def _attend(kv: PlainOrFloat8, block_size: int, bench: Bench) -> None:
    """Attend decodes and, over a bfloat16 pool, chunks, with both kernels and in parts."""
    steps = [decodes(64, 4096), decodes(1, 32768)]
    chunk = [BatchEntry(2048, 8192)]
    tokens = max(sum(entry.prefix + entry.tokens for entry in step) for step in steps)
    pool = AttentionPool(bench, LLAMA_8B, block_size=block_size, tokens=tokens, layers=1, kv=kv)
    calls: list[Call] = [pool.attend(step).calls[0] for step in steps]
    if kv == "plain":
        tunable, arch = TUNABLES["attention_chunk"], arch_of(bench.device)
        calls.append(pool.attend(chunk).calls[0])
        with trying(tunable.kernel, arch, next(tunable.candidates(tuned(tunable.kernel, arch, **tunable.facts)))):
            calls.append(pool.attend(chunk).calls[0])
        calls += [pool.attend(step, invariant=True).calls[0] for step in (*steps, chunk)]
    for call in calls:
        call()


def _states(bench: Bench) -> None:
    for lengths, context in (([VERIFIED_ROWS], 0), ([2048], 0), ([1], CONTEXT), ([1] * 32, CONTEXT)):
        layer_kernels(bench, lengths, context)()
