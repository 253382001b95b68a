"""Valid contracts, what breaks them, and how a drill's reports read."""

from __future__ import annotations

import json
import math
import pathlib
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from pillion.drill.contract import FIGURES, KINDS, Contract, StrikeCost, read_contract
from pillion.drill.report import StrikeReport, as_json, as_metrics, lines_of, table_of
from pillion.drill.streams import StreamTimes, pauses_of
from pillion.errors import ConfigError
from pillion.observability.metrics_file import write_whole

COST = StrikeCost(longest_pause_ms=812.5, recomputed_tokens=40, lost_blocks=0, lost_streams=0, full_strength_s=2.5)


@pytest.mark.parametrize(
    ("contract", "cost", "said"),
    [
        (Contract(), COST, ()),
        (Contract(longest_pause_ms=812.5, recomputed_tokens=40, full_strength_s=2.5), COST, ()),
        (Contract(longest_pause_ms=800), COST, ("longest_pause_ms is 812.5, and may be at most 800",)),
        (Contract(recomputed_tokens=0), COST, ("recomputed_tokens is 40, and may be at most 0",)),
        (Contract(lost_blocks=1), replace(COST, lost_blocks=2), ("lost_blocks is 2, and may be at most 1",)),
        (Contract(), replace(COST, lost_streams=1), ("lost_streams is 1, and may be at most 0",)),
        (Contract(lost_streams=1), replace(COST, lost_streams=1), ()),
        (Contract(full_strength_s=9), replace(COST, full_strength_s=math.inf),
         ("full_strength_s is inf, and may be at most 9",)),
        (Contract(), replace(COST, full_strength_s=math.inf),
         ("the cluster did not come back to its full strength",)),
    ],
)  # fmt: skip
def test_contract_violations(contract: Contract, cost: StrikeCost, said: tuple[str, ...]) -> None:
    assert contract.broken_by(cost) == said


def test_a_contract_file_has_global_and_per_kind_limits(tmp_path: pathlib.Path) -> None:
    toml, text = tmp_path / "c.toml", tmp_path / "c.json"
    toml.write_text("longest_pause_ms = 2000\nlost_blocks = 0\n[kvnode]\nlost_blocks = 40\n")
    text.write_text('{"longest_pause_ms": 2000, "lost_blocks": 0, "kvnode": {"lost_blocks": 40}}')
    found = read_contract(toml)
    assert found == read_contract(text)
    assert found["decode"] == Contract(longest_pause_ms=2000, lost_blocks=0)
    assert found["kvnode"] == Contract(longest_pause_ms=2000, lost_blocks=40)
    assert read_contract(None) == dict.fromkeys(KINDS, Contract())


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("c.toml", "longest_pause = 2", "neither a figure"),
        ("c.toml", "[worker]\nlost_blocks = 2", "neither a figure"),
        ("c.toml", "lost_blocks = -1", "from 0 on"),
        ("c.toml", "lost_blocks = true", "from 0 on"),
        ("c.toml", "lost_blocks = nan", "from 0 on"),
        ("c.toml", 'lost_blocks = "2"', "from 0 on"),
        ("c.toml", "decode = 2", "a table of figures"),
        ("c.toml", "=", "cannot be read"),
        ("c.json", "[]", "not an object"),
        ("missing.toml", "", "cannot be read"),
    ],
)
def test_a_wrong_contract_is_rejected(name: str, text: str, said: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / name.replace("missing", "other")).write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_contract(tmp_path / name)


KEPT = StrikeReport("decode", "decode-0", "killed", COST, streams=4, moved=2)
BROKEN = StrikeReport(
    "kvnode",
    "kv-0",
    "killed",
    replace(COST, lost_streams=1, full_strength_s=math.inf),
    streams=4,
    moved=4,
    broken=("a: b",),
    errors=("Unavailable: x",),
)


def test_reports_for_people_and_programs(tmp_path: pathlib.Path) -> None:
    console = Console(width=120)
    with console.capture() as shown:
        console.print(table_of([KEPT, BROKEN]))
    rows = [line.split() for line in shown.get().splitlines() if line.lstrip().startswith(("decode-0", "kv-0"))]
    assert rows == [
        ["decode-0", "killed", "4", "2", "812.5", "40", "0", "0", "2.5", "kept"],
        ["kv-0", "killed", "4", "4", "812.5", "40", "0", "1", "inf", "broken"],
    ]
    assert list(lines_of([KEPT, BROKEN])) == ["kv-0: a: b", "kv-0: a stream was lost: Unavailable: x"]
    write_whole(tmp_path / "r.json", as_json([KEPT, BROKEN]))
    found = json.loads((tmp_path / "r.json").read_text())
    assert not found["kept"]
    assert found["strikes"][1]["cost"]["full_strength_s"] is None
    assert json.loads(as_json([KEPT]))["kept"]
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_metrics_are_read_by_prometheus() -> None:
    families = {one.name: one for one in text_string_to_metric_families(as_metrics([KEPT, BROKEN], 1700000000.4))}
    by_kind = {
        name: {one.labels.get("kind", ""): one.value for one in family.samples} for name, family in families.items()
    }
    assert len(by_kind) == len(FIGURES) + 2
    assert by_kind["pillion_drill_longest_pause_ms"] == {"decode": 812.5, "kvnode": 812.5}
    assert by_kind["pillion_drill_full_strength_s"] == {"decode": 2.5, "kvnode": math.inf}
    assert by_kind["pillion_drill_contract_kept"] == {"decode": 1, "kvnode": 0}
    assert by_kind["pillion_drill_last_run_timestamp_seconds"] == {"": 1700000000}


@pytest.mark.parametrize(
    ("asked_s", "token_s", "paused", "first"),
    [
        (0.0, [1.0, 9.9, 10.4, 12.4, 12.5], [2.0], []),  # a token was under way when the fault came
        (0.0, [1.0, 10.4, 11.5, 14.5], [1.1], []),  # what begins later is no part of it
        (9.0, [13.0, 13.1], [], [3.0]),  # it had no token yet
        (10.5, [11.0], [], []),  # it was asked for later
        (0.0, [1.0, 9.0], [], []),  # it was over, or never went on
    ],
)
def test_a_pause_begins_at_the_fault(
    asked_s: float, token_s: list[float], paused: list[float], first: list[float]
) -> None:
    pauses, first_tokens = pauses_of([StreamTimes(asked_s, token_s)], 10.0)
    assert (pauses, first_tokens) == (pytest.approx(paused), pytest.approx(first))
