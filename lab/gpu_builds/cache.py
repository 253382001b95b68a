"""Fills Triton's cache with kernels, on all cores and without a GPU, for a process on another machine.

    python -m lab.gpu_builds.cache --folder FOLDER                   compiles into FOLDER, for TRITON_CACHE_DIR
    python -m lab.gpu_builds.cache --folder FOLDER --pack FILE       and packs its content
    python -m lab.gpu_builds.cache --folder FOLDER --carried FILE    unpacks first, and compiles what is missing

Launchers run as on a GPU, over CPU tensors without values, under a driver that compiles for one architecture and
launches nothing. So the compiled kernels are those of real launches. Names, and patterns of ``--only``:

    tune: KERNEL       the constants of every candidate of the tuner
    SECTION: CASE      the launches of a section of the benchmarks, with the constants in use
    model: NAME        the kernels of a whole model's steps, of decodes and of a chunk
    tests: FILE        the kernels of a test file, which is run for it (``tests/support/compiling_tests.py``)

A folder's ``done.json`` lists the jobs compiled from the current sources, which are skipped.

Triton's cache keys (triton/runtime/cache.py, get_cache_key; read in 3.6 and 3.7) consist of: Triton's version and a
digest of its compiler, both Python files and libtriton.so; the text and line of the kernel and of all that it calls;
types, constants and which arguments are multiples of 16; ptxas's version and the architecture; options and some
environment variables. Not of the kernel's path or Python's version, but libtriton.so differs by Python version. Hence:

* A cache of Triton 3.7 never hits in 3.6.
* One made by the same wheel on another machine hits, wherever the clone is there.
* One made by a wheel of the same release for another Python would hit but for libtriton.so. ``--wheel`` names the wheel
  of the other machine's Python: if all its other files equal the compiling ones byte for byte, its library's digest is
  used in the keys. The machine code then is of the same compiler sources, built for another Python.
* The process that reads the cache must make its keys the same way (:mod:`lab.gpu_builds.compilations`).
* An entry names its files by absolute paths (``__grp__*.json``), which unpacking rewrites.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fnmatch
import functools
import hashlib
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from lab.gpu_builds.compilations import counted_kernels, stable_keys

ARCH = 90
# Multiprocessors of an H200, for which launches are planned.
PROCESSORS = 132
# Files that a process reads of an entry; the others are for people.
KEPT = (".cubin", ".json")
MANIFEST = "manifest.json"
GROUP = "__grp__"
# Lists a folder's compiled jobs, with a digest of their sources.
DONE = "done.json"
SOURCES = (
    "engine/**/*.py",
    "kernels/gpu*/**/*.py",
    "kernels/gpu/tuning/*.json",
    "lab/benchmarks/gpu/*.py",
    "lab/gpu_builds/*.py",
    "tests/gpu/*.py",
    "tests/support/*.py",
)
# A model's kernels do not depend on its number of layers. Steps have the tokens and rows of the sections'.
LAYERS = 2
MODEL_SEQS = 64
DENSE = "Llama 3 8B"
# Steps are also measured with dependent launches.
EARLY = {"dependent_launch": 1}
TEST_LIMIT_S = 1800
COMPILING = "tests.support.compiling_tests"
# Environment variable with the compiler's key for a process of tests.
KEY = "TESTS_COMPILER_KEY"
ROOT = Path(__file__).resolve().parents[2]
_TRITON_PARTS = ("triton/compiler/", "triton/backends/", "triton/language/", "triton/runtime/cache.py")
_LIBRARY = "triton/_C/libtriton.so"


def compiler_key(wheel: Path | None = None) -> str:
    """Return the part of a cache's keys that identifies Triton, or the Triton of a wheel of the same release.

    Raises ValueError if the wheel's compiler differs in more than the library's build.
    """
    import triton
    from triton.runtime import cache

    own = str(cache.triton_key())
    if wheel is None:
        return own
    folder = Path(triton.__file__).parent.parent
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(_TRITON_PARTS) and name.endswith(".py"):
                here = folder / name
                if not here.exists() or here.read_bytes() != archive.read(name):
                    raise ValueError(f"{name} of {wheel.name} is not that of the Triton {triton.__version__} here")
        theirs = hashlib.sha256(archive.read(_LIBRARY)).hexdigest()
    ours = hashlib.sha256((folder / _LIBRARY).read_bytes()).hexdigest()
    if ours not in own:
        raise ValueError(f"Triton {triton.__version__} makes its keys in another way than 3.6 and 3.7")
    return own.replace(ours, theirs)


class _CompilingDriver:
    """A GPU driver for Triton that compiles kernels and launches nothing."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", ARCH, 32)
        self.utils = self
        self.launcher_cls = lambda source, metadata: lambda *arguments: None

    def get_current_target(self) -> Any:
        """Return the compile target."""
        return self._target

    def get_current_device(self) -> int:
        """Return the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the only stream."""
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Return the properties that Triton reads before it loads a kernel."""
        return {"max_shared_mem": 227 * 2**10, "multiprocessor_count": PROCESSORS}

    def load_binary(self, *arguments: Any) -> tuple[int, int, int, int, int]:
        """Load nothing; return a module, a function, registers, spills and the max threads."""
        return 0, 0, 0, 0, 1024


@functools.cache
def _begin(key: str) -> None:
    """Make this process compile only: no launches, no random numbers, no torch products."""
    import torch

    from lab.benchmarks.gpu import bench

    compile_for_gpu(key)
    torch.set_num_threads(1)
    # One copy of each case's data is enough.
    bench.ROTATED_BYTES = 1
    # Unwritten memory is never allocated, so weights and pools are free.
    torch.Tensor.normal_ = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.randn = lambda *size, **kwargs: torch.empty(*size, **kwargs)
    torch.mm = lambda left, right, *, out: out  # type: ignore[assignment]
    torch.addmm = lambda bias, left, right, *, out: out  # type: ignore[assignment]
    torch._scaled_mm = lambda *args, out, **kwargs: out


def compile_for_gpu(key: str) -> None:
    """Make launches of this process compile, under this ``key``."""
    from triton.runtime import cache, driver

    from pillion.kernels.gpu import launch

    stable_keys()
    driver.set_active(_CompilingDriver())
    cache.triton_key = lambda: key
    launch.INTERPRETED_PROCESSORS = PROCESSORS


def jobs(only: Sequence[str], most: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield jobs, by name and the constants to try, in the order of a visit's parts: each candidate of chunk attention;
    tests; launches of models and sections; candidates of the other kernels."""
    from lab.benchmarks.gpu.launches import section_launches
    from lab.benchmarks.gpu.mixture_shapes import ALL_MIXTURES
    from lab.benchmarks.gpu.tunables import TUNABLES
    from lab.benchmarks.gpu.visit_parts import compiled_tests
    from pillion.kernels.gpu.tuned import tuned

    def wanted(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in only)

    def candidates(name: str) -> Iterator[tuple[str, dict[str, int]]]:
        tunable, title = TUNABLES[name], f"tune: {name}"
        if wanted(title):
            found = tunable.candidates(tuned(tunable.kernel, ARCH, **tunable.facts))
            yield from ((title, use) for use in itertools.islice(found, most))

    first = [name for name in TUNABLES if name.startswith("attention_chunk")]
    for name in first:
        yield from candidates(name)
    tests = (f"tests: {path.stem}" for path in compiled_tests())
    models = (f"model: {name}" for name in (DENSE, *ALL_MIXTURES))
    yield from ((name, {}) for name in (*tests, *models) if wanted(name))
    yield from ((name, EARLY) for name in (f"model: {DENSE}",) if wanted(name))
    yield from ((name, {}) for name in section_launches() if wanted(name))
    for name in TUNABLES:
        if name not in first:
            yield from candidates(name)


def _compile(key: str, name: str, use: dict[str, int]) -> tuple[int, int]:
    """Compile one job; return the numbers of compiled and of cached kernels."""
    kind, _, what = name.partition(": ")
    if kind == "tests":
        return _run_tests(key, what)
    _begin(key)
    counts = counted_kernels()
    if kind == "tune":
        _launch_candidate(what, use)
    elif kind == "model":
        _run_model(what, use)
    else:
        from lab.benchmarks.gpu.launches import section_launches

        section_launches()[name](_bench())
    return counts["compiled"], counts["in the cache"]


def _bench() -> Any:
    import torch

    from lab.benchmarks.gpu.bench import Bench

    bench = Bench(smoke=False, rows=Path(os.devnull))
    bench.device = torch.device("cpu")
    return bench


def _launch_candidate(name: str, use: dict[str, int]) -> None:
    from lab.benchmarks.gpu.search import trying
    from lab.benchmarks.gpu.tunables import TUNABLES

    tunable = TUNABLES[name]
    with trying(tunable.kernel, ARCH, use):
        for make in tunable.cases(_bench()):
            make().calls[0]()


def _run_model(name: str, use: dict[str, int]) -> None:
    from lab.benchmarks.gpu.mixture_shapes import ALL_MIXTURES, fewer_layers
    from lab.benchmarks.gpu.mixtures import CHUNK
    from lab.benchmarks.gpu.model import RandomModel
    from lab.benchmarks.gpu.search import trying
    from lab.benchmarks.gpu.shapes import LLAMA_8B
    from pillion.engine.backends.gpu.gpu_backend import GpuBackend

    config = fewer_layers(ALL_MIXTURES.get(name) or LLAMA_8B.config(), LAYERS)
    with contextlib.ExitStack() as stack:
        for kernel, on in use.items():
            stack.enter_context(trying(kernel, ARCH, {"on": on}))
        model = RandomModel(_bench(), max_tokens=CHUNK, max_seqs=MODEL_SEQS, max_model_len=2 * CHUNK, config=config)
        GpuBackend(model.model, model.layout, model.limits, enforce_eager=True).allocate_workspace()


def _run_tests(key: str, name: str) -> tuple[int, int]:
    """Compile the launches of a test file, in a process, since tests choose where kernels run."""
    command = ["-m", "pytest", "-q", "-p", COMPILING, "-p", "no:cacheprovider", f"tests/gpu/{name}.py"]
    environment = {**os.environ, KEY: key}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TEST_LIMIT_S
    )
    found = re.search(r"^compiled (\d+), in the cache (\d+)$", done.stdout, re.M)
    if found is None:
        raise RuntimeError(f"no count: {(done.stdout + done.stderr)[-200:]}")
    return int(found[1]), int(found[2])


def compile_all(
    only: Sequence[str],
    most: int,
    processes: int,
    key: str,
    folder: Path,
    say: Callable[[str], None],
    until_s: float = math.inf,
) -> dict[str, int]:
    """Compile all jobs in parallel, except those that ``folder`` lists as done, beginning none after ``until_s``
    (monotonic); return counts of kernels and of jobs that failed, were done or are left."""
    found: collections.Counter[str] = collections.Counter()
    about = {"sources": sources_digest(), "key": _digest(key)}
    known = json.loads((folder / DONE).read_text("utf-8")) if (folder / DONE).exists() else {}
    done: list[str] = known["jobs"] if {name: known.get(name) for name in about} == about else []
    wanted = {f"{name} {use or ''}".rstrip(): (name, use) for name, use in jobs(only, most)}
    # Forks start with all imports done.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        under_way = {pool.submit(_compile, key, *job): title for title, job in wanted.items() if title not in done}
        found["done before"] = len(wanted) - len(under_way)
        for job in as_completed(under_way):
            if time.monotonic() > until_s:
                found["left"] = sum(other.cancel() for other in under_way)
            if job.cancelled():
                continue
            try:
                compiled, hits = job.result()
                found.update({"compiled": compiled, "in the cache": hits})
            except Exception as error:  # noqa: BLE001  (too much shared memory, say: the others are compiled)
                found["failed"] += 1
                say(f"{under_way[job]}: {type(error).__name__}: {str(error)[:200]}")
            done = [*done, under_way[job]]
            (folder / DONE).write_text(json.dumps({**about, "jobs": done}), "utf-8")
    return {what: count for what, count in found.items() if count}


def sources_digest() -> str:
    """Return a digest of the files that determine launches and their constants."""
    found = hashlib.sha256()
    for path in sorted({path for pattern in SOURCES for path in ROOT.glob(pattern)}):
        found.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def pack(folder: Path, target: Path, key: str) -> int:
    """Pack the kernels of a cache and return their number."""
    import triton

    target.parent.mkdir(parents=True, exist_ok=True)
    entries = sorted({path.parent for path in folder.glob("*/*.cubin")})
    about = {"triton": triton.__version__, "key": _digest(key), "kernels": len(entries)}
    with tarfile.open(target, "w:xz") as archive:
        text = json.dumps(about).encode()
        head = tarfile.TarInfo(MANIFEST)
        head.size = len(text)
        archive.addfile(head, io.BytesIO(text))
        if (folder / DONE).exists():
            archive.add(folder / DONE, DONE)
        for entry in entries:
            for path in sorted(entry.iterdir()):
                if path.suffix in KEPT:
                    archive.add(path, f"{entry.name}/{path.name}")
    return len(entries)


def unpack(source: Path, folder: Path, key: str) -> str:
    """Unpack a cache packed under this ``key`` and return a line about the result."""
    with tarfile.open(source) as archive:
        manifest = archive.extractfile(MANIFEST)
        about = json.load(manifest) if manifest is not None else {}
        if about.get("key") != _digest(key):
            return f"{source.name} is of another build of Triton ({about.get('triton')}): nothing of it can be found"
        archive.extractall(folder, filter="data")
    for group in folder.glob(f"*/{GROUP}*"):
        names = json.loads(group.read_text("utf-8"))["child_paths"]
        paths = {name: str(group.parent / name) for name in names if (group.parent / name).exists()}
        group.write_text(json.dumps({"child_paths": paths}), "utf-8")
    return f"{source.name}: {about['kernels']} kernels"


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def main() -> int:
    """Unpack, compile and pack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="Triton's cache; default: a new one that is removed")
    parser.add_argument("--carried", type=Path, help="a packed cache, which is unpacked first")
    parser.add_argument("--pack", type=Path, help="the file that gets all of the cache")
    parser.add_argument("--wheel", type=Path, help="the wheel of Triton, of this release, that will look for kernels")
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of names of kernels and models")
    parser.add_argument("--most", type=int, default=sys.maxsize, help="candidates of each kernel")
    parser.add_argument("--time-s", type=float, default=math.inf, help="begin no job after this time")
    parser.add_argument("--processes", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    args = parser.parse_args()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pil-") as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        # Functions of the interpreter cannot be compiled.
        os.environ |= {"TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "0"}
        key = compiler_key(args.wheel)
        print(f"Triton's compiler is {_digest(key)}", flush=True)
        if args.carried:
            print(unpack(args.carried, folder, key), flush=True)
        until_s = began_s + args.time_s
        found = compile_all(
            args.only, args.most, args.processes, key, folder, lambda line: print(line, flush=True), until_s
        )
        counts = ", ".join(f"{count} {what}" for what, count in sorted(found.items()))
        print(f"kernels: {counts or 'none'}; {time.monotonic() - began_s:.0f} s on {args.processes} cores", flush=True)
        if args.pack:
            print(f"{args.pack}: {pack(folder, args.pack, key)} kernels, {args.pack.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
