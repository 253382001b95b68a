"""The compiler produces working code, and the cache stores it on disk."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import os
import subprocess
import sys

import numpy as np
import pytest

from pillion.kernels.cpu.language.isa import BY_NAME, TABLE, choose_isa, host_features
from pillion.kernels.cpu.language.module import SIGNATURE
from pillion.kernels.cpu.products.gemm import Gemm
from pillion.kernels.cpu.runtime import code_cache, compiler
from pillion.kernels.cpu.runtime.code_cache import CodeCache, key_of
from pillion.kernels.cpu.runtime.compiler import compile_kernels, target_of
from tests.support.machine_code import assembly, object_code
from tests.support.processes import started
from tests.support.small_kernels import Halve, Scale, WhoAmI

SPECS = [Scale(), Halve()]
GEMM = Gemm("fp32", "fp32", "store")
HERE = [isa for isa in TABLE if set(isa.needs) <= host_features()]
KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(SIGNATURE.args))
by_name = pytest.mark.parametrize("isa", HERE, ids=lambda isa: isa.name)


@pytest.fixture
def isa():
    found = choose_isa("auto", host_features())
    return found or pytest.skip("no row of the table fits this processor")


def runs(kernels):
    """Return whether the kernel "halve" halves sixteen numbers."""
    x, out = np.arange(16, dtype=np.float32), np.zeros(16, np.float32)
    words = np.zeros(Halve.layout.num_words, np.int64)
    Halve.layout.fill(words, {"x": x, "out": out})
    KERNEL(kernels.address("halve"))(words.ctypes.data, 0, 0, 0, 0, 1)
    return np.array_equal(out, x / 2)


@by_name
@pytest.mark.parametrize("checked", [False, True])
def test_compiled_kernels_run(isa, checked):
    kernels = compile_kernels([*SPECS, Halve()], isa, checked=checked)
    assert runs(kernels)
    assert kernels.names == ("scale_1", "halve")
    assert (kernels.checked, kernels.from_cache) == (checked, False)
    with pytest.raises(KeyError):
        kernels.address("another")


@pytest.mark.skipif(not {"avx2", "avx512"} <= {isa.name for isa in HERE}, reason="needs a processor with AVX-512")
def test_instruction_sets_use_only_their_features():
    texts = {name: assembly([Scale()], BY_NAME[name])["scale_1"] for name in ("avx2", "avx512")}
    assert "zmm" in texts["avx512"]
    assert "ymm" in texts["avx2"]
    assert "zmm" not in texts["avx2"]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_every_row_compiles_on_every_machine(row):
    assert object_code(SPECS, row)[:4] == b"\x7fELF"
    assert target_of(row).triple.startswith(row.machine)
    assert ("fmla" if row.machine == "aarch64" else "vfmadd") in assembly(SPECS, row)["scale_1"]


def test_the_assembly_has_every_function(isa):
    texts = assembly(SPECS, isa)
    assert set(texts) >= {"scale_1", "halve", "pool_run", "pool_main", "pool_wait"}
    assert all(text.count(".Lfunc_end") == 1 for text in texts.values())


# -- the cache


def compiled(folder, isa, specs=SPECS, **more):
    kernels = compile_kernels(specs, isa, cache_folder=folder, **more)
    assert runs(kernels)
    return kernels


def files(folder):
    """The cached code, without the lock file."""
    return sorted(file for file in folder.iterdir() if file.name != "compile.lock")


def test_cached_kernels_generate_no_ir(tmp_path, isa, monkeypatch):
    folder = tmp_path / "new" / "kernels"
    lines = []
    assert not compiled(folder, isa, progress=lines.append).from_cache
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(compiler, "KernelModule", None)
    assert compiled(folder, isa, progress=lines.append).from_cache
    assert [line.split(" (")[0] for line in lines] == [
        f"compiling CPU kernels for {isa.name}",
        f"CPU kernels for {isa.name} compiled",
        f"CPU kernels for {isa.name} from the cache",
    ]
    assert len(files(folder)) == len(SPECS) + 1  # And the thread pool.


def test_kernels_are_cached_one_by_one(tmp_path, isa):
    """Another program compiles only what is new in it, and subroutines once for both modes."""
    compiled(tmp_path, isa)
    before, lines = set(files(tmp_path)), []
    assert not compiled(tmp_path, isa, [Halve(), WhoAmI()], progress=lines.append).from_cache
    assert lines[0] == f"compiling CPU kernels for {isa.name} (1)"
    assert len(files(tmp_path)) == len(before) + 1
    assert compiled(tmp_path, isa, [WhoAmI(), Halve(), Scale()]).from_cache
    subroutines = {name for name in assembly([GEMM], isa) if name.startswith("gemm_tile")}
    known = set(files(tmp_path))
    compiled(tmp_path, isa, [Halve(), GEMM])
    fast = set(files(tmp_path)) - known
    assert len(fast) == len(subroutines) + 1
    # One subroutine was removed: the kernel that calls it is written again, and no other subroutine.
    oldest = min(fast, key=lambda file: file.stat().st_size)
    oldest.unlink()
    assert not compiled(tmp_path, isa, [Halve(), GEMM]).from_cache
    assert set(files(tmp_path)) == known | fast
    compiled(tmp_path, isa, [Halve(), GEMM], checked=True)
    assert len(set(files(tmp_path)) - known - fast) == 2


@pytest.mark.parametrize("damage", ["truncated", "edited", "empty", "header", "renamed"])
def test_damaged_code_is_compiled_again(tmp_path, isa, damage, caplog):
    compiled(tmp_path, isa)
    kept = files(tmp_path)
    file, other, *_ = kept
    good = file.read_bytes()
    if damage == "renamed":  # The code of another kernel, whole, under this name.
        file.write_bytes(other.read_bytes())
    else:
        middle = len(good) // 2
        edited = good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :]
        other = bytes([good[0] ^ 1]) + good[1:]
        file.write_bytes({"truncated": good[:-1], "edited": edited, "empty": b"", "header": other}[damage])
    with caplog.at_level(logging.WARNING):
        assert not compiled(tmp_path, isa).from_cache
    assert "damaged" in caplog.text
    assert files(tmp_path) == kept
    assert file.read_bytes() == good
    assert compiled(tmp_path, isa).from_cache


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_code_writable_by_others_is_not_run(tmp_path, isa, caplog, mode):
    compiled(tmp_path, isa)
    file = files(tmp_path)[0]
    file.chmod(mode)
    assert not compiled(tmp_path, isa).from_cache
    assert "other users could have written it" in caplog.text
    assert file.stat().st_mode & 0o777 == 0o600


def test_cache_keys_depend_on_mode_kernels_and_processor(tmp_path, isa, monkeypatch):
    compiled(tmp_path, isa)
    assert not compiled(tmp_path, isa, checked=True).from_cache
    assert not compiled(tmp_path, isa, specs=[*SPECS, WhoAmI()]).from_cache
    assert not compiled(tmp_path, dataclasses.replace(isa, attention_rows=isa.attention_rows + 1)).from_cache
    target = target_of(isa)
    for other in (
        dataclasses.replace(target, features=target.features + ",+nopl"),
        dataclasses.replace(target, cpu=isa.model),
    ):
        monkeypatch.setattr(compiler, "target_of", lambda isa, other=other: other)
        assert not compiled(tmp_path, isa).from_cache
    # Once the two kernels in checked mode, once an additional one, and three times both with another thread pool.
    assert len(files(tmp_path)) == 3 + 2 + 1 + 3 * 3
    monkeypatch.undo()
    assert compiled(tmp_path, isa).from_cache


def test_cache_keys_depend_on_sources(tmp_path, monkeypatch):
    package = tmp_path / "cpu"
    package.mkdir()
    (package / "a.py").write_text("x = 1")
    (package / "b.py").write_text("y = 2")
    monkeypatch.setattr(code_cache, "__file__", str(package / "runtime" / "code_cache.py"))
    seen = []

    def imported_anew() -> None:
        monkeypatch.setattr(code_cache, "sources_digest", code_cache.digest_sources())
        seen.append(key_of("names"))

    imported_anew()
    (package / "b.py").write_text("y = 3")
    # The digest is that of the imported sources, regardless of the current ones on disk.
    assert key_of("names") == seen[-1]
    imported_anew()
    (package / "b.py").rename(package / "c.py")
    imported_anew()
    (tmp_path / "kv_codes.py").write_text("MIN_SCALE = 1")
    imported_anew()
    (package / "c.py").unlink()
    imported_anew()
    (package / "a.py").unlink()
    imported_anew()
    CodeCache(tmp_path / "kept").write({"key": b"code"})
    assert not (tmp_path / "kept").exists()
    seen += [key_of("nam", "es"), key_of("name", "s"), key_of("names", "")]
    assert len(set(seen)) == len(seen)


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, isa, caplog):
    (tmp_path / "file").write_text("no folder")
    assert not compiled(tmp_path / "file" / "kernels", isa).from_cache
    assert "cannot cache compiled kernels" in caplog.text


def test_least_recently_used_files_are_evicted(tmp_path, monkeypatch):
    monkeypatch.setattr(code_cache, "MAX_ENTRIES", 3)
    cache = CodeCache(tmp_path)
    for age, key in enumerate("abc"):
        cache.write({key: key.encode()})
        os.utime(tmp_path / f"{key}.kernels", (1000 + age, 1000 + age))
    assert cache.read("a") == b"a"  # So b is now the least recently used one.
    cache.write({"d": b"d"})
    assert [cache.read(key) for key in "abcd"] == [b"a", None, b"c", b"d"]
    monkeypatch.setattr(code_cache, "MAX_CACHE_BYTES", 200)
    cache.write({"e": bytes(100)})
    assert [cache.read(key) is not None for key in "abcde"] == [False, False, False, False, True]


def test_code_above_the_limit_is_not_cached(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(code_cache, "MAX_ENTRY_BYTES", 8)
    cache = CodeCache(tmp_path)
    cache.write({"a": bytes(9), "b": bytes(8)})
    assert cache.read("a") is None
    assert cache.read("b") == bytes(8)
    assert "not caching a compiled kernel" in caplog.text


CHILD = """
import sys
from pathlib import Path
from pillion.kernels.cpu.language.isa import choose_isa, host_features
from pillion.kernels.cpu.runtime.compiler import compile_kernels
from tests.support.small_kernels import Halve, Scale
print("ready", flush=True)
sys.stdin.readline()
isa = choose_isa("auto", host_features())
print(compile_kernels([Scale(), Halve()], isa, cache_folder=Path(sys.argv[1])).from_cache)
"""


def test_of_several_processes_one_compiles(tmp_path, isa):
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(started(command, **pipes)) for _ in range(3)]
        for child in children:
            assert child.stdout.readline() == "ready\n"
        for child in children:
            child.stdin.write("\n")
            child.stdin.flush()
        found = [child.communicate(timeout=200)[0] == "True\n" for child in children]
    assert sorted(found) == [False, True, True]
    assert len(files(tmp_path)) == len(SPECS) + 1
    assert compiled(tmp_path, isa).from_cache
