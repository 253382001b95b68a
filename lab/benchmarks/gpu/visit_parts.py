"""The parts of a visit to a GPU, most valuable first.

A part is a command; its results are stored by name and digest of the files that it depends on. To add a kernel, add its
files to the part that measures it. New sections and tests are found by name and run early.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from lab.benchmarks.gpu.mixture_shapes import FURTHER, MIXTURES
from lab.benchmarks.gpu.section import SECTIONS
from lab.benchmarks.gpu.used_files import used_files

ROOT = Path(__file__).resolve().parents[3]
TESTS = "tests/gpu"
# Placeholders in a command: the visit's folder, the file of the part's rows, and its seconds.
FOLDER, ROWS, SECONDS = "FOLDER", "ROWS", "SECONDS"

# Files that determine kernels and steps: patterns of Path.glob from the root of the clone.
_ATTENTION = ("kernels/gpu/*.py", "kernels/gpu/attention/*.py")
_SAMPLING = ("kernels/gpu/*.py", "kernels/gpu/sampling/*.py")
_EVERY_KERNEL = ("kernels/gpu/**/*.py", "kernels/gpu_states/*.py")
# Tuned constants: measurements depend on them, the search does not.
_TUNING = ("kernels/gpu/tuning/*.json",)
_STEPS = (*_EVERY_KERNEL, *_TUNING, "engine/backends/gpu/*.py", "engine/gpu_states/*.py")
_CLUSTER = (*_STEPS, "engine/scheduling/*.py", "kvstore/gpu/*.py", "lab/benchmarks/gpu/e2e.py")
# Of the imports of tests and sections, those on which results on a GPU depend.
_COUNTED = re.compile(
    r"kernels/gpu(_states)?/|engine/(backends/gpu|gpu_\w+)/|kvstore/gpu/|lab/benchmarks/gpu/|tests/(gpu|support)/"
)
# The test of a KV node's death comes last. Tests of builds need no GPU and are left out.
_DEATH, _BUILDS = "test_surviving_pool.py", "test_build.py"
# Tests of kernels that never ran on a GPU or changed most since; first, most used kernels first.
_FIRST = (
    "test_expert_routing.py",
    "test_code_values.py",
    "test_quantized_product.py",
    "test_grouped_product.py",
    "test_gpu_experts.py",
    "test_layer_kinds.py",
    "test_paged_attention.py",
    "test_kv_write.py",
    "test_gated.py",
    "test_embedding.py",
    "test_norms.py",
    "test_pair_sorting.py",
    "test_dense_gemm.py",
    "test_state_kernels.py",
    "test_gpu_hybrids.py",
    "test_gpu_eagle.py",
    "test_sampling.py",
    "test_low_rank_product.py",
    "test_expert_adapters.py",
    "test_quantized_models.py",
    "test_fp8_product.py",
    "test_latent_attention.py",
    "test_batch_invariance.py",
    "test_dependent_launch.py",
    "test_overlapped_attention.py",
    "test_hybrid_ranks.py",
)
# Tests of whole models or clusters, which passed on a GPU or need more packages; after the measurements.
_LATER = (
    "test_backend.py",
    "test_cluster.py",
    "test_divided_pools.py",
    "test_draft_answers.py",
    "test_rank_group.py",
    "test_ranks.py",
    "test_staged_cluster.py",
    "test_stages.py",
    "test_states_cluster.py",
    "test_texts.py",
    "test_weights.py",
)
# Tests that start processes, which choose where kernels run.
_PROCESSES = ("test_hybrid_ranks.py",)
# Sections with a fixed place, and those after the search of constants. Others are new.
_NAMED = ("mixtures", "step", "small", "attention", "e2e")
_USUAL = ("prefill", "line", "products")
# Compiled-ahead model (lab/gpu_builds/cache.py) of most sections.
_DENSE = ("model: Llama 3 8B",)
_LAUNCHES = ("attention", "grouped", "products", "small", "states")
# Seconds of a test file, mostly compilation unless done ahead, and the limit of a new section.
TEST_S, NEW_S = 150, 120
# Files with many kernels: 1.5 s for each, and half a minute.
_LONG_TESTS = {
    "test_backend.py": 260,
    "test_batch_invariance.py": 190,
    "test_expert_adapters.py": 180,
    "test_gpu_hybrids.py": 190,
    "test_kv_write.py": 240,
    "test_norms.py": 180,
    "test_paged_attention.py": 170,
    "test_quantized_product.py": 220,
}


@dataclass(frozen=True, slots=True)
class VisitPart:
    """One part of a visit.

    Attributes:
        name: stable, since results are stored by it.
        command: the arguments of Python.
        seconds: time limit. It does not begin with less time left.
        files: patterns of the files that its results depend on.
        beside: may run beside its neighbours, since it measures no time.
        kernels: patterns of what to compile before (:mod:`lab.gpu_builds.cache`).
    """

    name: str
    command: tuple[str, ...]
    seconds: int
    files: tuple[str, ...]
    beside: bool = False
    kernels: tuple[str, ...] = ()

    def digest(self) -> str:
        """Return a hexadecimal digest of the command, and of the names and contents of the files."""
        found = hashlib.sha256(repr(self.command).encode())
        for path in sorted({path for pattern in self.files for path in ROOT.glob(pattern)}):
            found.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
        return found.hexdigest()[:16]


def section(name: str, seconds: int, files: tuple[str, ...], only: tuple[str, ...] = (), title: str = "") -> VisitPart:
    """Make the part of a section, or of its measurements whose names contain a word of ``only``."""
    command = ("-m", "lab.benchmarks.gpu.section", name, "--rows", ROWS, *(("--only", *only) if only else ()))
    kernels = (f"{name}: *",) if name in _LAUNCHES else _DENSE
    own = counted_files(ROOT / "lab" / "benchmarks" / "gpu" / f"{name}.py")
    own = tuple(place for place in own if place.startswith("lab/"))
    return VisitPart(title or name, command, seconds, (*own, *files), kernels=kernels)


def tuning(title: str, kernels: tuple[str, ...], seconds: int, files: tuple[str, ...]) -> VisitPart:
    """Make the part that searches kernels' constants."""
    command = ("-m", "lab.benchmarks.gpu.tune", *kernels, "--out", FOLDER, "--rows", ROWS, "--time-s", SECONDS)
    return VisitPart(
        title,
        command,
        seconds,
        ("lab/benchmarks/gpu/tunables.py", *files),
        kernels=tuple(f"tune: {name}" for name in kernels or ("*",)),
    )


def tests_of(path: Path) -> VisitPart:
    """Make the part of a test file. It runs again if the file changes, or its imports of kernels, of the backend and of
    test helpers."""
    place = path.relative_to(ROOT).as_posix()
    command = ("-m", "pytest", place, "-q", "-p", "no:cacheprovider", "-o", "timeout=1200")
    name, seconds = f"tests: {path.stem.removeprefix('test_')}", _LONG_TESTS.get(path.name, TEST_S)
    return VisitPart(name, command, seconds, counted_files(path), beside=True)


def counted_files(path: Path) -> tuple[str, ...]:
    """Return the files used by a module that determine its results on a GPU."""
    return tuple(place for place in used_files(ROOT, path) if _COUNTED.match(place))


def kernel_tests() -> list[Path]:
    """List the early test files in order."""
    left_out = (_DEATH, _BUILDS, *_LATER)
    paths = [path for path in sorted((ROOT / TESTS).glob("test_*.py")) if path.name not in left_out]
    return sorted(paths, key=lambda path: _FIRST.index(path.name) if path.name in _FIRST else len(_FIRST))


def compiled_tests() -> list[Path]:
    """List those whose kernels can be compiled ahead, since they start no processes."""
    return [path for path in kernel_tests() if path.name not in _PROCESSES]


def visit_parts() -> list[VisitPart]:
    """List all parts in order: tests of kernels early, those of new kernels first."""
    tests, later = (
        [tests_of(path) for path in paths] for paths in (kernel_tests(), [ROOT / TESTS / name for name in _LATER])
    )
    measured = [
        tuning("chunk attention: tiles", ("attention_chunk*",), 60, _ATTENTION),
        *tests,
        replace(
            section("mixtures", 150, _STEPS, tuple(MIXTURES)), kernels=tuple(f"model: {name}" for name in MIXTURES)
        ),
        *(section(name, min(SECTIONS[name], NEW_S), _STEPS) for name in SECTIONS if name not in (*_NAMED, *_USUAL)),
        section("step", 120, _STEPS, ("graphs",), "dense steps"),
        section("small", 40, (*_SAMPLING, *_TUNING), ("top_p", "temperature 1"), "drawing a token"),
        section("attention", 40, (*_ATTENTION, *_TUNING), ("fp8",), "attention over KV in 8 bits"),
        section("products", 90, _STEPS, ("fp4", "int4", "nf4"), "products by 4 bits"),
        section("e2e", 110, _CLUSTER, ("colocated",), "end to end: co-located"),
        section("e2e", 200, _CLUSTER, ("auto",), "end to end: auto"),
        section("e2e", 200, _CLUSTER, ("disaggregated",), "end to end: disaggregated"),
        replace(
            section("mixtures", 100, _STEPS, tuple(FURTHER), "further mixtures"),
            kernels=tuple(f"model: {name}" for name in FURTHER),
        ),
    ]
    tuned = tuning("tuning of all kernels", (), 240, _EVERY_KERNEL)
    usual = [section(name, SECTIONS[name], _STEPS) for name in _USUAL]
    death = replace(tests_of(ROOT / TESTS / _DEATH), name="a KV node's death", beside=False)
    return [*measured, tuned, *usual, *later, death]


def in_order(parts: Iterable[VisitPart], known: dict[str, dict[str, object]]) -> list[VisitPart]:
    """Return the parts to run: those without a result for their current files, in order, then those that failed with
    them, so that a failing part does not delay others at every visit."""
    fresh, failed = [], []
    for part in parts:
        before = known.get(part.name, {})
        if before.get("digest") != part.digest():
            fresh.append(part)
        elif before.get("error"):
            failed.append(part)
    return [*fresh, *failed]


def batches(parts: list[VisitPart]) -> list[list[VisitPart]]:
    """Group neighbours that may run beside each other."""
    found: list[list[VisitPart]] = []
    for part in parts:
        if found and part.beside and found[-1][0].beside:
            found[-1].append(part)
        else:
            found.append([part])
    return found
