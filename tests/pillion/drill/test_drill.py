"""A drill starts only with consent and if every component has a spare; its exit status is its result."""

from __future__ import annotations

import asyncio
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from click.testing import CliRunner

from pillion.cli.drill_command import drill
from pillion.drill import drill as module
from pillion.drill.contract import StrikeCost, read_contract
from pillion.drill.drill import DrillPlan, choose_victims
from pillion.drill.report import StrikeReport
from pillion.drill.strikes import Striker
from pillion.errors import ConfigError, Unavailable
from pillion.types import ComponentStatus
from tests.support.fake_components import running_fake_cluster


@pytest.mark.parametrize(
    ("striker", "more", "said", "struck"),
    [
        (Striker(), {}, "is not a process of this user's `pillion serve` here", []),
        (
            Striker("kill {component}"),
            {},
            "decode-0 is the only decode component of model toy, and nothing would restart it",
            [],
        ),
        (Striker("kill {component}", supervised=True), {"pause_s": 1.0}, "{signal}", []),
        (Striker("kill {component}"), {"kinds": ("gateway",)}, "no component to strike", []),
        (Striker("kill {component}", supervised=True), {}, "", ["decode-0", "prefill-0", "kv-0"]),
        # Which replica such a command strikes is not known, and no status knows of a Redis.
        (Striker("kill {role}", "start {role}"), {"kinds": ("kvnode", "redis")}, "", ["kvnode", "redis"]),
    ],
)
async def test_a_drill_needs_spares(striker: Striker, more: dict[str, Any], said: str, struck: list[str]) -> None:
    async with running_fake_cluster() as fakes:
        reach = {"target": fakes.gateway.grpc_address}
        plan = DrillPlan(reach=reach, contract=read_contract(None), striker=striker, **more)
        if said:
            with pytest.raises(ConfigError, match="the drill does not start") as refused:
                await asyncio.to_thread(choose_victims, plan)
            assert said in refused.value.message
        else:
            chosen = await asyncio.to_thread(choose_victims, plan)
            assert [one.component_id for one in chosen] == struck


def test_no_gateway_no_drill() -> None:
    plan = DrillPlan(reach={"target": "unix:/no/such"}, contract={}, striker=Striker())
    with pytest.raises(ConfigError, match="the drill does not start"):
        choose_victims(plan)


VICTIM = ComponentStatus(component_id="decode-0", role="decode")


def played(monkeypatch: pytest.MonkeyPatch, reports: Sequence[StrikeReport], error: Exception | None = None) -> None:
    """Let drills return these reports, and perhaps an error after them."""

    def run(plan: DrillPlan, chosen: Sequence[ComponentStatus]) -> Iterator[StrikeReport]:
        yield from reports
        if error is not None:
            raise error

    monkeypatch.setattr(module, "choose_victims", lambda plan: [VICTIM])
    monkeypatch.setattr(module, "run_drill", run)


def report(*broken: str) -> StrikeReport:
    return StrikeReport("decode", "decode-0", "killed", StrikeCost(), 4, 2, broken)


def test_the_exit_status_reports_whether_the_contract_held(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    files = {name: tmp_path / name for name in ("json", "metrics-file")}
    args = ["--yes", *(word for name, path in files.items() for word in (f"--{name}", str(path)))]
    for found, status in (((report(),), 0), ((report(), report("too long")), 1)):
        played(monkeypatch, found)
        assert CliRunner().invoke(drill, args, standalone_mode=False).return_value == status
        assert json.loads(files["json"].read_text())["kept"] == (status == 0)
        assert f'kept{{kind="decode"}} {1 - status}' in files["metrics-file"].read_text()
    for path in files.values():
        path.unlink()
    played(monkeypatch, [report()], Unavailable("it cannot be struck"))
    result = CliRunner().invoke(drill, args, standalone_mode=False)
    assert isinstance(result.exception, Unavailable)
    assert "decode-0" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("typed", "begins"), [("drill\n", True), ("yes\n", False), ("\n", False), ("", False)])
def test_consent_is_required(monkeypatch: pytest.MonkeyPatch, typed: str, begins: bool) -> None:
    played(monkeypatch, [report()])
    result = CliRunner().invoke(drill, [], input=typed, standalone_mode=False)
    assert "decode-0 will be killed" in result.stderr
    if begins:
        assert result.return_value == 0
    else:
        assert isinstance(result.exception, ConfigError)
        assert "without consent" in result.exception.message


@pytest.mark.parametrize(
    ("args", "said"),
    [(["--start", "x"], "need --kill"), (["--json", "/no/such/r.json"], "--json: there is no folder /no/such")],
)
def test_invalid_option_combinations_are_rejected(monkeypatch: pytest.MonkeyPatch, args: list[str], said: str) -> None:
    played(monkeypatch, [report()])
    result = CliRunner().invoke(drill, ["--yes", *args], standalone_mode=False)
    assert isinstance(result.exception, ConfigError)
    assert said in result.exception.message
