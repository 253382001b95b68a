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
    """Whether this processor has all that an instruction set needs."""
    return set(BY_NAME[name].needs) <= host_features()


# Instruction sets for which the kernels' language writes different code: with matrix tiles, with the bfloat16
# instruction alone, and without. The best comes first.
ISAS = ("amx", "avx512_bf16", "avx2")
_HERE = [name for name in ISAS if isa_runs(name)]


def _is_quick(name: str, checked: bool) -> bool:
    """Whether all runs of the tests have a mode.

    Of several instruction sets that a processor has, the best runs without checks and the least with them, because
    checks are written alike for all. Without, the least is a part of the best one's code, and whole models run it
    (tests/engine/backends/test_cpu_backend.py). Those in between have code of their own in few kernels alone.
    """
    if name not in _HERE or len(_HERE) == 1:
        return True
    return name == _HERE[-1 if checked else 0]


MODES = [(name, checked) for name in ISAS for checked in (False, True) if _is_quick(name, checked) or name == _HERE[0]]
# The row of the table that has matrix tiles, and the row that emulates them where this processor has none.
TILES, EMULATED_TILES = "amx", "emulated_tiles"
# The modes of matrix tiles: the processor's own, or emulated ones.
TILE_MODES = [(TILES if isa_runs(TILES) or not _HERE else EMULATED_TILES, checked) for checked in (False, True)]
# The modes of kernels whose code differs between all of ISAS.
ALL_MODES = list(dict.fromkeys([*MODES, *TILE_MODES, *((name, False) for name in _HERE[1:-1])]))


def kernel_modes(modes: Iterable[tuple[str, bool]]) -> list[Any]:
    """Parameters for those of ``modes`` that this processor can run; a mode is long unless it is quick.

    Where it can run none they are all of ``modes``, which are then skipped. A test of tests/kernels/cpu/test_isa.py is
    skipped for each instruction set that is left out.
    """
    modes = list(modes)
    here = [mode for mode in modes if mode[0] == EMULATED_TILES or isa_runs(mode[0])] or modes
    long = {mode: mode not in ALL_MODES or not _is_quick(*mode) for mode in here}
    return [
        pytest.param(mode, marks=pytest.mark.long if long[mode] else (), id=f"{mode[0]}{'-checked' * mode[1]}")
        for mode in here
    ]


# This mark runs a test only in those MODES whose kernels check what they touch.
with_checks = pytest.mark.parametrize("runner", kernel_modes(mode for mode in MODES if mode[1]), indirect=True)


def registers_of(name: str) -> Any:
    """A parameter for an instruction set whose code is read and not run: one of each width of vectors is not long."""
    return pytest.param(name, marks=() if name in (*ISAS, "neon") else pytest.mark.long)


def isa_or_skip(name: str) -> Isa:
    """The instruction set ``name``, with exact products of codes; skips the test where this processor does not have
    it."""
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


# A runner keeps so many pools, each of which has one kernel.
MAX_POOLS = 8


class Runner:
    """Runs kernels for one instruction set on pools of one and of three threads. Each is compiled, with what it calls,
    when it first runs, so that none is compiled whose tests are left out."""

    def __init__(self, specs: Sequence[KernelSpec], isa: Isa, checked: bool) -> None:
        self.isa, self._checked = isa, checked
        self._names = {spec.name for spec in specs}
        self._pools: dict[tuple[str, int], ThreadPool] = {}

    def close(self) -> None:
        """Ends the pools' threads."""
        while self._pools:
            self._pools.popitem()[1].close()

    def run(self, spec: KernelSpec, values: Mapping[str, Any], step: CpuStepRecord, threads: int = 3) -> None:
        """Runs one kernel."""
        assert spec.name in self._names
        kernels = kept_kernels([spec], self.isa, checked=self._checked)
        args = np.zeros(spec.layout.num_words, np.int64)
        spec.layout.fill(args, values)
        program = np.array([[kernels.address(spec.name), args.ctypes.data, -1, 0]], np.int64)
        assert program.shape[1] == ENTRY_WORDS
        self._pool(spec.name, kernels, threads).run(program, step.words)

    def _pool(self, name: str, kernels: CompiledKernels, threads: int) -> ThreadPool:
        pool = self._pools.pop((name, threads), None) or ThreadPool(kernels, threads)
        # The one that was used last comes last.
        self._pools[name, threads] = pool
        if len(self._pools) > MAX_POOLS:
            self._pools.pop(next(iter(self._pools))).close()
        return pool


def runner_of(specs: Sequence[KernelSpec], modes: Sequence[tuple[str, bool]] = MODES) -> Any:
    """A fixture ``runner`` for a module: runs its kernels in each of ``modes``."""

    @pytest.fixture(scope="module", params=kernel_modes(modes))
    def runner(request: Any) -> Iterator[Runner]:
        name, checked = request.param
        found = Runner(specs, isa_or_skip(name), checked)
        yield found
        found.close()

    return runner


def outer_tiles(names: Iterable[str]) -> list[str]:
    """Of functions' names those of the tiles with the fewest and the most rows, of each kind and width."""
    tiles: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for name in names:
        if found := re.fullmatch(r"(\w*_tile_\w+_)(\d+)(x\d+)", name):
            kind, rows, width = found.groups()
            tiles[kind, width][int(rows)] = name
    return list(dict.fromkeys(each[end(each)] for each in tiles.values() for end in (min, max)))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normally distributed numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows_step(tokens: int, samples: int = 0) -> CpuStepRecord:
    """A step's record with the numbers of rows, and nothing else."""
    step = CpuStepRecord()
    step.count("num_tokens", tokens)
    step.count("num_samples", samples)
    step.count("num_logits", samples)
    return step


def batch_step(batch: StepBatch, pool: torch.Tensor | None = None) -> CpuStepRecord:
    """A step's record of ``batch``."""
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
    """values [rows, width], padded by zeros to whole cache lines, and ``extra`` rows of ``filler`` after them."""
    per_line = 64 // values.element_size()
    width = -(-values.shape[1] // per_line) * per_line
    found = torch.zeros((len(values) + extra, width), dtype=values.dtype)
    found[: len(values), : values.shape[1]] = values
    found[len(values) :] = filler
    return found


def columns_of(rows: torch.Tensor, first: int) -> tuple[int, int]:
    """The memory of rows of float32 from a column on: where it begins, and how many bytes it has."""
    return rows.data_ptr() + 4 * first, rows.nbytes - 4 * first


def stride(buffer: torch.Tensor) -> int:
    """Bytes from row to row."""
    return buffer.stride(0) * buffer.element_size()
