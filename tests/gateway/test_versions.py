"""Components of other versions: shown by the gateway, and not used if their protocol differs too much."""

from __future__ import annotations

from lab.testbed.conditions import until
from pillion._version import PROTOCOL
from pillion.cli.talk import component_lines, version_line
from pillion.observability import metric_catalog as names
from pillion.wire.registry import FOREIGN
from tests.support.fake_components import record, running_fake_cluster


async def test_other_versions_are_used_only_with_a_near_protocol() -> None:
    async with running_fake_cluster("The answer.") as fakes:
        address = f"unix:{fakes.folder}/nobody.sock"
        near = record("near", "prefill", address, version="0.9", protocol=PROTOCOL - 1, model="other")
        far = record("far", "prefill", address, version="0.1", protocol=PROTOCOL - 2)
        for other in (near, far):
            await fakes.registry.heartbeat(other)

        def counted() -> dict[tuple[str, ...], float]:
            counts = fakes.gateway.meters.collect()[names.COMPONENTS]
            return {labels: count for labels, count in counts.items() if labels[0] in ("0.9", "0.1")}

        wanted = {("0.9", f"{PROTOCOL - 1}", "yes"): 1, ("0.1", f"{PROTOCOL - 2}", "no"): 1}
        await until("both to be counted", lambda: counted() == wanted)
        status = await fakes.client.status()
        shown = {one.component_id: one for one in status.components}
        assert (shown["near"].role, shown["near"].version, shown["near"].protocol) == ("prefill", "0.9", PROTOCOL - 1)
        assert (shown["far"].role, shown["far"].version, shown["far"].protocol) == (FOREIGN, "0.1", PROTOCOL - 2)
        assert shown["far"].trouble == f"it is not used: it speaks protocol {PROTOCOL - 2}, not {PROTOCOL}"
        assert any(shown["far"].trouble in line for line in component_lines(status))
        assert f"0.1, protocol {PROTOCOL - 2}: far" in version_line(status)
        assert "far" not in {one.component_id for one in fakes.gateway.cluster.view}
        assert "".join([delta.text async for delta in fakes.client.generate("x")]) == "The answer."
