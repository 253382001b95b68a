"""The committed stubs are what protos/ says, and every message and field of it is documented or named clearly."""

from __future__ import annotations

import itertools
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROTOS = sorted((ROOT / "protos").rglob("*.proto"))


def test_stubs_match_the_protos(tmp_path: pathlib.Path) -> None:
    subprocess.run([sys.executable, ROOT / "protos" / "generate.py", tmp_path], check=True, capture_output=True)
    made = {path.name: path.read_bytes() for path in (tmp_path / "pillion" / "v1").iterdir()}
    kept = {p.name: p.read_bytes() for p in (ROOT / "pillion" / "v1").iterdir() if "_pb2" in p.name and p.is_file()}
    assert made.keys() == kept.keys()
    assert [name for name in made if made[name] != kept[name]] == [], "run `make protos`"


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_rpcs_are_documented(path: pathlib.Path) -> None:
    lines = path.read_text().splitlines()
    for above, line in itertools.pairwise(lines):
        if re.match(r"\s*(rpc|service) \w+", line):
            assert above.strip().startswith("//"), f"{path.name}: {line.strip()} has no comment"


# Numbers without a unit.
BARE = {"temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logprob"}


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_quantities_end_in_their_unit(path: pathlib.Path) -> None:
    for name in re.findall(r"(?:double|float)\s+(\w+)\s*=", path.read_text()):
        assert name.endswith("_ms") or name in {*BARE, "top_logprobs"}, name
