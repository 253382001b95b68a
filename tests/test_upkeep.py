"""The version, the workflow, the hooks and the benchmarks agree with what the rest of the project says of them."""

from __future__ import annotations

import os
import pathlib
import re
import tomllib

import yaml

from pillion._version import VERSION
from tests.support.pages import make_targets, makefile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_all_version_numbers_agree() -> None:
    chart = yaml.safe_load((ROOT / "deploy/helm/pillion/Chart.yaml").read_text())
    assert {PROJECT["version"], chart["version"], chart["appVersion"]} == {VERSION}
    unreleased, newest, *_ = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert unreleased == "Unreleased"
    assert re.fullmatch(rf"{re.escape(VERSION)} - \d{{4}}-\d\d-\d\d", newest)
    supported = re.findall(r"^\| (\d+\.\d+)\.x \| yes", (ROOT / "SECURITY.md").read_text(), re.MULTILINE)
    assert supported == [VERSION.rpartition(".")[0]]


def test_the_workflow_runs_the_tests_on_each_python() -> None:
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["tests"]
    oldest, *_ = pythons = job["strategy"]["matrix"]["python"]
    assert PROJECT["requires-python"] == f">={oldest}"
    assert pythons == ["3.11", "3.12", "3.13"]
    (last,) = [step for step in job["steps"] if ".ci/run" in step.get("run", "")]
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert set(last["env"]) - {"PIP_EXTRA_INDEX_URL"} == {"PYTHON"}
    assert re.search(r"^PYTHON \?=", makefile(), re.MULTILINE)


def test_pre_commit_hooks_run_the_makefile_checks() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    called = [hook["entry"].split()[-1] for hook in local["hooks"]]
    assert called == ["lint", "style"]
    assert set(called) <= make_targets()
    assert re.search(r"^check: lint types style\b", makefile(), re.MULTILINE)


# Benchmarks without a figure: Make targets that fail by themselves, and generators of traces.
WITHOUT_FIGURE = {"load_test", "soak", "traces", "mooncake", "replays"}


def test_each_benchmark_is_on_the_measurements_page() -> None:
    """What is measured stands on the page with its command, date and machine; what does not stand there goes."""
    page = (ROOT / "lab/docs/measurements.md").read_text()
    named = set(re.findall(r"[a-z0-9_]+(?:-[a-z0-9_]+)*", " ".join(re.findall(r"`([^`]+)`", page))))
    programs = {
        path.stem
        for path in (ROOT / "lab/benchmarks").glob("*.py")
        if 'if __name__ == "__main__"' in path.read_text() and "ArgumentParser" in path.read_text()
    }
    assert sorted(programs - named - WITHOUT_FIGURE) == [], "these have no row in lab/docs/measurements.md"
    kept = {path.stem for path in (ROOT / "lab/benchmarks/results").glob("*.json")} - {"load_test", "soak"}
    assert sorted(kept - named) == []
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.endswith("| command |")]
    assert [
        row
        for row in rows
        if not re.search(r" \| [ABCDEFS], (?:\d\d|Dec \d) \| (the same|[^|]*`[a-z_]+)[^|]* \|$", row)
    ] == []
    assert len(rows) >= 40


def test_files_and_tests_cited_in_seeds_md_exist() -> None:
    for named in re.findall(
        r"`((?:tests|engine|gateway|kvstore|kernels|lab)/[^`]+)`", (ROOT / "lab/docs/seeds.md").read_text()
    ):
        path, _, test = named.partition("::")
        assert (ROOT / path).exists(), f"{named}: there is no such file"
        assert not test or f"def {test}(" in (ROOT / path).read_text(), f"{named}: there is no such test"
