"""A visit to a GPU: its order, its time limit, and resuming it."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from lab.benchmarks.gpu import visit as visiting
from lab.benchmarks.gpu import visit_parts
from lab.benchmarks.gpu.section import SECTIONS
from lab.benchmarks.gpu.visit import RESERVE_S, Visit, _tests, visit_page
from lab.benchmarks.gpu.visit_parts import ROWS, VisitPart, batches, in_order
from lab.gpu_builds.cache import jobs, pack, unpack

ROOT = pathlib.Path(__file__).resolve().parents[3]
ROW = {
    "name": "a",
    "value": 1.0,
    "unit": "us",
    "share": None,
    "of": "",
    "target": "",
    "note": "",
    "more": {},
    "met": None,
}
GOOD = f"import json, sys; open(sys.argv[1], 'w').write(json.dumps({ROW}))"


@pytest.fixture
def clone(tmp_path, monkeypatch) -> pathlib.Path:
    """A folder in place of the clone, with a kernel."""
    folder = tmp_path / "clone"
    folder.mkdir()
    (folder / "kernel.py").write_text("first")
    monkeypatch.setattr(visit_parts, "ROOT", folder)
    return folder


def part(name: str, program: str = GOOD, seconds: int = 5, beside: bool = False) -> VisitPart:
    return VisitPart(name, ("-c", program, ROWS), seconds, ("kernel.py",), beside)


def visit(folder: pathlib.Path, parts: list[VisitPart], time_s: float = 60.0) -> dict:
    """Run these parts and return the results in the visit's folder."""
    made = Visit(parts, folder, folder / "none", time_s + RESERVE_S, dry=False)
    made.run(in_order(parts, made.parts), dict(os.environ))
    made.write()
    return json.loads((folder / "visit.json").read_text())["parts"]


def test_a_visit_resumes_the_last_one(clone, tmp_path):
    out, marks = tmp_path / "out", tmp_path / "marks"
    marks.mkdir()
    noted = f"open(r'{marks}/' + sys.argv[2], 'a').write('x')"
    parts = [VisitPart(name, ("-c", f"{GOOD}; {noted}", ROWS, name), 3, ("kernel.py",)) for name in "ab"]
    found = visit(out, parts, time_s=2.0)
    assert found == {}, "no part began that could not have ended in time"
    found = visit(out, parts[:1])
    assert found["a"]["rows"] == [ROW]
    assert not found["a"]["error"]
    assert set(visit(out, parts)) == {"a", "b"}
    assert [(marks / name).read_text() for name in "ab"] == ["x", "x"]
    (clone / "kernel.py").write_text("second")
    visit(out, parts)
    assert [(marks / name).read_text() for name in "ab"] == ["xx", "xx"]


def test_parts_that_failed_with_these_files_run_last(clone):
    parts = [part(name) for name in "abc"]
    known = {
        "a": {"digest": parts[0].digest(), "error": "ended with 1"},
        "b": {"digest": parts[1].digest(), "error": ""},
        "c": {"digest": "of other files", "error": "ended with 1"},
    }
    assert [each.name for each in in_order(parts, known)] == ["c", "a"]


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("raise SystemExit(3)", "ended with 3"),
        ("import time; time.sleep(60)", "stopped after 1 s"),
        ("", "no figures"),
        (GOOD.replace("1.0", "None").replace("'note': ''", "'note': 'needs redis'"), "needs redis"),
    ],
)
def test_a_part_without_figures_is_retried(clone, tmp_path, program, error):
    failing = part("a", program, seconds=1 if "sleep" in program else 5)
    found = visit(tmp_path / "out", [failing, part("b")])
    assert found["a"]["error"] == error
    assert not found["b"]["error"]
    assert [each.name for each in in_order([failing, part("b")], found)] == ["a"]


def test_results_of_another_gpu_are_ignored(clone, tmp_path, monkeypatch):
    out = tmp_path / "out"
    visit(out, [part("a")])
    monkeypatch.setattr(visiting, "device", lambda: {"name": "another", "date": "2026-01-01"})
    assert Visit([], out, out / "none", 60.0, dry=False).parts == {}


def test_only_neighbours_run_side_by_side():
    parts = [part("a"), part("b", beside=True), part("c", beside=True), part("d"), part("e", beside=True)]
    assert [[each.name for each in batch] for batch in batches(parts)] == [["a"], ["b", "c"], ["d"], ["e"]]


def test_every_section_and_every_test_has_a_part():
    parts = visit_parts.visit_parts()
    names = [each.name for each in parts]
    assert len(names) == len(set(names))
    assert {each.command[2] for each in parts if each.command[1].endswith(".section")} == set(SECTIONS)
    tested = {each.command[2] for each in parts if each.command[1] == "pytest"}
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests/gpu").glob("test_*.py")}
    assert there - tested == {"tests/gpu/test_build.py"}
    for each in parts:
        assert all(list(ROOT.glob(pattern)) for pattern in each.files), each.name


def test_a_part_depends_on_what_its_tests_import():
    files = {each.name: each.files for each in visit_parts.visit_parts()}
    assert "kernels/gpu/rows/gated.py" in files["tests: gated"]
    assert "kernels/gpu/rows/norms.py" not in files["tests: gated"]
    # These tests name no kernel.
    assert {"kernels/gpu/attention/paged_attention.py", "tests/support/gpu_model.py"} <= {*files["tests: layer_kinds"]}
    assert "lab/benchmarks/gpu/mixture_shapes.py" in files["mixtures"]


def test_every_pattern_of_a_part_names_kernels_to_compile_ahead():
    for pattern in {pattern for each in visit_parts.visit_parts() for pattern in each.kernels}:
        assert next(jobs([pattern], 1), None), pattern


def test_the_page_lists_figures_and_remaining_parts(clone):
    done, left = part("done"), part("left", seconds=7)
    result = {
        "device": {"name": "GPU", "date": "2026-01-01"},
        "parts": {"done": {"digest": done.digest(), "date": "2026-01-01", "rows": [ROW], "seconds": 2.0, "error": ""}},
    }
    page = visit_page(result, [done, left])
    assert "* left (up to 7 s): never ran" in page
    assert "* done" not in page
    assert "## done\n\n2026-01-01, 2 s.\n\n| what |" in page
    assert "| a | 1 us |" in page


@pytest.mark.parametrize(
    ("text", "value", "note"),
    [
        ("=== 3 failed, 12 passed, 1 skipped in 4.2s ===", 12, "3 failed, 1 skipped"),
        ("7 passed in 0.1s", 7, ""),
        ("5 tests collected in 1.2s", 0, "5 tests collected"),
    ],
)
def test_pytests_last_line_is_a_figure(text, value, note):
    (row,) = _tests(f"...\n{text}\n")
    assert (row["value"], row["note"]) == (value, note)


def test_a_packed_cache_is_found_where_it_is_unpacked(tmp_path):
    entry = tmp_path / "made" / "KEY"
    entry.mkdir(parents=True)
    for name in ("k.cubin", "k.json", "k.source", "k.ttir"):
        (entry / name).write_text(name)
    paths = {each.name: str(each) for each in entry.iterdir()}
    (entry / "__grp__k.json").write_text(json.dumps({"child_paths": paths}))
    packed = tmp_path / "packed.tar.xz"
    assert pack(tmp_path / "made", packed, "compiler") == 1
    assert "nothing of it can be found" in unpack(packed, tmp_path / "other", "another compiler")
    assert not (tmp_path / "other").exists()
    assert unpack(packed, tmp_path / "there", "compiler").endswith("1 kernels")
    found = json.loads((tmp_path / "there/KEY/__grp__k.json").read_text())["child_paths"]
    assert found == {name: str(tmp_path / "there/KEY" / name) for name in ("k.cubin", "k.json")}
    assert all(pathlib.Path(path).read_text() == name for name, path in found.items())


@pytest.mark.long
def test_kernels_compiled_without_a_gpu_are_cache_hits_later(tmp_path):
    command = [sys.executable, "-m", "lab.gpu_builds.cache", "--only", "tune: gated", "--most", "2", "--processes", "1"]
    packed = tmp_path / "packed.tar.xz"
    for folder, words, said in (
        ("first", ["--pack", str(packed)], "2 compiled"),
        ("second", ["--carried", str(packed)], "2 done before"),
        ("second", [], "2 in the cache"),
    ):
        done = subprocess.run(
            [*command, "--folder", str(tmp_path / folder), *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
        (tmp_path / folder / "done.json").unlink()


@pytest.mark.long
def test_no_compilation_begins_after_the_time_limit(tmp_path):
    command = [sys.executable, "-m", "lab.gpu_builds.cache", "--only", "tune: gated", "--most", "8", "--processes", "1"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path), "--time-s", "0"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert " left" in done.stdout
    begun = json.loads((tmp_path / "done.json").read_text())["jobs"]
    assert 0 < len(begun) < 8
