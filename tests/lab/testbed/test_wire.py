"""Links of the test bed keep order, delay, rate and loss, and a network of real hosts is set up and removed."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.testbed.conditions import WITHIN_S
from lab.testbed.networks import missing, network
from lab.testbed.wire import MAX_QUEUED_S, LinkRule, Wires
from tests.support.examples import examples

CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), float(sys.argv[2]))
except ConnectionRefusedError:
    print("refused")
except OSError:
    print("silence")
"""


@given(
    st.lists(st.tuples(st.floats(0.0, 0.05), st.integers(20, 9000)), max_size=40),
    st.floats(0.0, 0.1),
    st.sampled_from([0.0, 1e5, 1e6]),
)
@settings(max_examples=examples(100), deadline=None)
def test_a_link_keeps_order_delay_and_rate(sent: list[tuple[float, int]], delay_s: float, bytes_per_s: float) -> None:
    wires = Wires(seed=1)
    wires.rule(0, 1, LinkRule(delay_s, bytes_per_s))
    now_s, passed = 0.0, []
    for number, (pause_s, size) in enumerate(sent):
        now_s += pause_s
        before = wires.dropped
        wires.carry(now_s, 0, 1, number.to_bytes(2, "big") * (size // 2))
        if wires.dropped == before:
            passed.append((number, now_s, size // 2 * 2))
    assert wires.carried == len(passed)
    assert bytes_per_s or wires.dropped == 0
    # Step by step, as the process does it.
    arrived: list[tuple[int, float]] = []
    while (next_s := wires.next_s) is not None:
        assert wires.due(next_s - 1e-9) == []
        arrived += [(int.from_bytes(packet[:2], "big"), next_s) for _, packet in wires.due(next_s)]
    assert [number for number, _ in arrived] == [number for number, _, _ in passed]
    for (_, at_s), (_, begun_s, size) in zip(arrived, passed, strict=True):
        slow_s = size / bytes_per_s if bytes_per_s else 0.0
        assert begun_s + delay_s + slow_s - 1e-9 <= at_s <= begun_s + delay_s + slow_s + MAX_QUEUED_S + 1e-9


def test_a_cut_drops_one_way_and_loss_is_a_share() -> None:
    wires = Wires(seed=1)
    wires.rule(0, 1, LinkRule(cut=True))
    wires.rule(2, 1, LinkRule(loss=0.25))
    for _ in range(4000):
        wires.carry(0.0, 0, 1, b"there")
        wires.carry(0.0, 1, 0, b"back")
    assert (wires.carried, wires.dropped) == (4000, 4000)
    for _ in range(4000):
        wires.carry(0.0, 2, 1, b"x")
    assert 900 <= wires.dropped - 4000 <= 1100
    assert {target for target, _ in wires.due(1.0)} == {0, 1}


@pytest.mark.skipif(missing() != "", reason=missing())
def test_hosts_reach_each_other_until_they_are_cut_or_move() -> None:
    def reaches(within_s: float) -> bool:
        # Nothing listens there, so a reachable host refuses.
        command = [*net.enter("one"), sys.executable, "-c", CONNECT, net.address("other"), f"{within_s}"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        assert said in ("refused", "silence")
        return said == "refused"

    with network("one", "other") as net:
        assert reaches(WITHIN_S)
        net.link("one", "other", LinkRule(cut=True))
        assert not reaches(0.5)
        assert net.counts()[1] > 0
        net.links()
        before = net.address("other")
        net.move("other")
        assert net.address("other") != before
        assert reaches(WITHIN_S)
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    assert f"pil{net._number}-" not in listed
