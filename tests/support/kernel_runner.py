"""Runs single CPU kernels on arrays, as a program of one entry."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pillion.errors import ConfigError
from pillion.kernels.cpu.language.isa import BY_NAME, TABLE, Isa, choose_isa, host_features
from pillion.kernels.cpu.language.module import KernelSpec
from pillion.kernels.cpu.runtime.compiler import CompiledKernels
from pillion.kernels.cpu.runtime.program import CpuStepRecord
from pillion.kernels.cpu.runtime.thread_pool import ENTRY_WORDS, ThreadPool
from pillion.kernels.step import StepBatch
from tests.support.kernel_cache import kept_kernels


def isa_runs(name: str) -> bool:
    """Return True if this processor supports an instruction set."""
    return set(BY_NAME[name].needs) <= host_features()


# Instruction sets with different generated code: matrix tiles, the bfloat16 instruction alone, neither. Best first.
ISAS = ("amx", "avx512_bf16", "avx2")
_HERE = [name for name in ISAS if isa_runs(name)]


def _is_quick(name: str, checked: bool) -> bool:
    """Return True if every test run includes a mode.

    Of the instruction sets that a processor supports, the best runs without checks and the least with them, since
    checks are generated alike for all. Without checks the least one's code is a part of the best one's, and whole
    models run it (tests/engine/backends/test_cpu_backend.py). Those in between differ in few kernels.
    """
    if name not in _HERE or len(_HERE) == 1:
        return True
    return name == _HERE[-1 if checked else 0]


MODES = [(name, checked) for name in ISAS for checked in (False, True) if _is_quick(name, checked) or name == _HERE[0]]
# Row of the table with matrix tiles, and row that emulates them on other processors.
TILES, EMULATED_TILES = "amx", "emulated_tiles"
TILE_MODES = [(TILES if isa_runs(TILES) or not _HERE else EMULATED_TILES, checked) for checked in (False, True)]
ALL_MODES = list(dict.fromkeys([*MODES, *TILE_MODES, *((name, False) for name in _HERE[1:-1])]))


def kernel_modes(modes: Iterable[tuple[str, bool]]) -> list[Any]:
    """Return parameters for those of ``modes`` that this processor can run; a mode is long unless it is quick.

    If it can run none, return all, which are then skipped. A test of tests/kernels/cpu/test_isa.py is skipped for each
    instruction set that is left out.
    """
    modes = list(modes)
    here = [mode for mode in modes if mode[0] == EMULATED_TILES or isa_runs(mode[0])] or modes
    long = {mode: mode not in ALL_MODES or not _is_quick(*mode) for mode in here}
    return [
        pytest.param(mode, marks=pytest.mark.long if long[mode] else (), id=f"{mode[0]}{'-checked' * mode[1]}")
        for mode in here
    ]


# Mark that runs a test only in those MODES whose kernels check their memory accesses.
with_checks = pytest.mark.parametrize("runner", kernel_modes(mode for mode in MODES if mode[1]), indirect=True)


def registers_of(name: str) -> Any:
    """Return a parameter for an instruction set whose code is read, not run; one per vector width is not long."""
    return pytest.param(name, marks=() if name in (*ISAS, "neon") else pytest.mark.long)


def rounding_tiles() -> Isa:
    """Return the instruction set whose matrix tiles round codes, emulated on processors without tiles; skip the test on
    those without AVX-512 BF16, whose code for rounding is missing."""
    isa_or_skip("avx512_bf16")
    return replace(isa_or_skip(TILE_MODES[0][0]), rounds_codes=True)


def isa_or_skip(name: str) -> Isa:
    """Return the instruction set ``name``, with exact products of codes; skip the test if this processor lacks it."""
    if name == EMULATED_TILES:
        best = next((isa for isa in TABLE if not isa.matrix_tiles and isa.name in _HERE), None)
        if best is None:
            pytest.skip("matrix tiles are emulated on x86-64 with AVX2")
        return replace(best, name=name, matrix_tiles=True, emulated_tiles=True)
    try:
        isa = choose_isa(name, host_features(), exact_codes=True)
    except ConfigError as lacking:
        pytest.skip(str(lacking))
    assert isa is not None
    return isa


MAX_POOLS = 8


class Runner:
    """Runs kernels for one instruction set on pools of one and of three threads. Each is compiled, with its callees,
    when it first runs, so that deselected tests compile nothing."""

    def __init__(self, specs: Sequence[KernelSpec], isa: Isa, checked: bool) -> None:
        self.isa, self._checked = isa, checked
        self._names = {spec.name for spec in specs}
        self._pools: dict[tuple[str, int], ThreadPool] = {}

    def close(self) -> None:
        """End the pools' threads."""
        while self._pools:
            self._pools.popitem()[1].close()

    def run(self, spec: KernelSpec, values: Mapping[str, Any], step: CpuStepRecord, threads: int = 3) -> None:
        """Run one kernel."""
        assert spec.name in self._names
        kernels = kept_kernels([spec], self.isa, checked=self._checked)
        args = np.zeros(spec.layout.num_words, np.int64)
        spec.layout.fill(args, values)
        program = np.array([[kernels.address(spec.name), args.ctypes.data, -1, 0]], np.int64)
        assert program.shape[1] == ENTRY_WORDS
        self._pool(spec.name, kernels, threads).run(program, step.words)

    def _pool(self, name: str, kernels: CompiledKernels, threads: int) -> ThreadPool:
        pool = self._pools.pop((name, threads), None) or ThreadPool(kernels, threads)
        self._pools[name, threads] = pool
        if len(self._pools) > MAX_POOLS:
            self._pools.pop(next(iter(self._pools))).close()
        return pool


def runner_of(specs: Sequence[KernelSpec], modes: Sequence[tuple[str, bool]] = MODES) -> Any:
    """Return a module's fixture ``runner`` that runs its kernels in each of ``modes``."""

    @pytest.fixture(scope="module", params=kernel_modes(modes))
    def runner(request: Any) -> Iterator[Runner]:
        name, checked = request.param
        found = Runner(specs, isa_or_skip(name), checked)
        yield found
        found.close()

    return runner


def outer_tiles(names: Iterable[str]) -> list[str]:
    """Return the names of the tile functions with the fewest and the most rows, of each kind and width."""
    tiles: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for name in names:
        if found := re.fullmatch(r"(\w*_tile_\w+_)(\d+)(x\d+)", name):
            kind, rows, width = found.groups()
            tiles[kind, width][int(rows)] = name
    return list(dict.fromkeys(each[end(each)] for each in tiles.values() for end in (min, max)))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return normally distributed numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows_step(tokens: int, samples: int = 0) -> CpuStepRecord:
    """Return a step's record with the numbers of rows only."""
    step = CpuStepRecord()
    step.count("num_tokens", tokens)
    step.count("num_samples", samples)
    step.count("num_logits", samples)
    return step


def batch_step(batch: StepBatch, pool: torch.Tensor | None = None) -> CpuStepRecord:
    """Return a step's record of ``batch``."""
    step = rows_step(batch.num_tokens, len(batch.sample_rows))
    for name in ("token_ids", "positions", "query_starts", "context_lens", "block_tables", "sample_rows"):
        step.point(name, getattr(batch, name))
    step.point("rope_rows", batch.table_rows)
    step.point("row_seqs", np.repeat(np.arange(batch.num_seqs, dtype=np.int32), np.diff(batch.query_starts)))
    step.count("num_seqs", batch.num_seqs)
    step.count("table_stride", batch.block_tables.shape[1])
    if pool is not None:
        step.point_pool(pool.data_ptr(), pool.nbytes)
    return step


def padded(values: torch.Tensor, extra: int = 0, filler: float = 0.0) -> torch.Tensor:
    """Return values [rows, width] zero-padded to whole cache lines, and ``extra`` rows of ``filler`` after them."""
    per_line = 64 // values.element_size()
    width = -(-values.shape[1] // per_line) * per_line
    found = torch.zeros((len(values) + extra, width), dtype=values.dtype)
    found[: len(values), : values.shape[1]] = values
    found[len(values) :] = filler
    return found


def columns_of(rows: torch.Tensor, first: int) -> tuple[int, int]:
    """Return the address and size in bytes of float32 rows from a column on."""
    return rows.data_ptr() + 4 * first, rows.nbytes - 4 * first


def stride(buffer: torch.Tensor) -> int:
    """Return the stride of rows in bytes."""
    return buffer.stride(0) * buffer.element_size()
