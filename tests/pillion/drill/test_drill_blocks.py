"""Which blocks of a KV node a drill counts as lost."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pillion.drill import drill
from pillion.drill.contract import Contract
from pillion.drill.drill import DrillPlan
from pillion.drill.strikes import Striker
from pillion.types import ComponentStatus


@pytest.mark.parametrize(("seen", "recovered"), [([0, 0, 49], True), ([0, 20, 48], False), ([64], True)])
def test_a_node_recovers_its_blocks_bit_by_bit(
    seen: list[int], recovered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, blocks = DrillPlan(reach={}, contract={"kvnode": Contract()}, striker=Striker()), dict[str, int]()
    for count in seen:
        node = ComponentStatus(component_id="kv-0", role="kvnode", committed_blocks=count)
        status = SimpleNamespace(components=(node, ComponentStatus(component_id="decode-0", role="decode")))
        monkeypatch.setattr(drill, "_status", lambda _, status=status: status)
        found = drill._blocks_recovered(plan, {"kv-0": 49}, blocks)
    assert found == recovered
    assert blocks == {"kv-0": seen[-1]}
