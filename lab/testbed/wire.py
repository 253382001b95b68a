"""Carrier of packets between the hosts of lab/testbed/networks.py, over links that are slow, narrow, lossy or cut.

    a packet leaves a host --cut, lost or the queue is full--> dropped
                  +--sent at the link's rate, after those before it--> delayed --> the host that has its address

A process in place of `tc netem`, which the kernel of a test machine may lack: the packets of each host's TUN device go
through it. :class:`Wires` decides, on a given clock; the rest moves bytes.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import os
import random
import select
import sys
import time
from dataclasses import dataclass

MTU_BYTES = 9000
# Length of a link's queue, in seconds of its rate; further packets are dropped, as by a router.
MAX_QUEUED_S = 0.1
# Destination in an IPv4 packet.
DESTINATION = slice(16, 20)


@dataclass(frozen=True, slots=True)
class LinkRule:
    """One direction of a link: delay in s, rate in bytes/s (0: unlimited), share of lost packets, and whether it is
    cut."""

    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    loss: float = 0.0
    cut: bool = False


PERFECT = LinkRule()


class Wires:
    """The rules of all links and the packets in flight. Hosts are numbers. Sans-IO.

    Attributes:
        carried, dropped: packets that passed a link, or did not.
    """

    def __init__(self, seed: int) -> None:
        self.carried = self.dropped = 0
        self._rules: dict[tuple[int, int], LinkRule] = {}
        self._free_s: dict[tuple[int, int], float] = {}
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._under_way: list[tuple[float, int, int, bytes]] = []

    def rule(self, source: int, target: int, rule: LinkRule) -> None:
        """Set the rule of one direction of a link. Packets in flight are not affected."""
        self._rules[source, target] = rule

    def carry(self, now_s: float, source: int, target: int, packet: bytes) -> None:
        """Accept a packet from a host."""
        link = source, target
        rule = self._rules.get(link, PERFECT)
        sent_s = max(now_s, self._free_s.get(link, 0.0)) if rule.bytes_per_s else now_s
        full = sent_s - now_s > MAX_QUEUED_S
        if rule.cut or full or (rule.loss and self._random.random() < rule.loss):
            self.dropped += 1
            return
        if rule.bytes_per_s:
            sent_s += len(packet) / rule.bytes_per_s
            self._free_s[link] = sent_s
        self.carried += 1
        heapq.heappush(self._under_way, (sent_s + rule.delay_s, next(self._numbers), target, packet))

    def due(self, now_s: float) -> list[tuple[int, bytes]]:
        """Return the packets that arrive by now, each with its destination host."""
        found = []
        while self._under_way and self._under_way[0][0] <= now_s:
            _, _, target, packet = heapq.heappop(self._under_way)
            found.append((target, packet))
        return found

    @property
    def next_s(self) -> float | None:
        """Time of the next arrival, None without packets in flight."""
        return self._under_way[0][0] if self._under_way else None


def run(devices: list[int]) -> None:
    """Carry packets between TUN devices until the end of standard input. Each line is a JSON object, {"address":
    [ADDRESS, HOST]} or {"rule": [SOURCE, TARGET, DELAY_S, BYTES_PER_S, LOSS, CUT]}, answered with both counts once
    applied."""
    wires, owners = Wires(seed=1), dict[bytes, int]()
    hosts = {device: number for number, device in enumerate(devices)}
    for device in devices:
        os.set_blocking(device, False)
    lines = b""
    while True:
        next_s = wires.next_s
        timeout_s = None if next_s is None else max(0.0, next_s - time.monotonic())
        ready, _, _ = select.select([0, *devices], [], [], timeout_s)
        for device in ready:
            if device == 0:
                read = os.read(0, 2**16)
                if not read:
                    return
                *whole, lines = (lines + read).split(b"\n")
                for line in whole:
                    _obey(json.loads(line), wires, owners)
                    print(wires.carried, wires.dropped, flush=True)
                continue
            with contextlib.suppress(BlockingIOError):
                while True:
                    packet = os.read(device, MTU_BYTES)
                    target = owners.get(packet[DESTINATION])
                    # Other packets than IPv4 (e.g. router solicitations) are dropped.
                    if target is not None and packet[0] >> 4 == 4:
                        wires.carry(time.monotonic(), hosts[device], target, packet)
        for target, packet in wires.due(time.monotonic()):
            with contextlib.suppress(OSError):
                os.write(devices[target], packet)


def _obey(order: dict[str, list[object]], wires: Wires, owners: dict[bytes, int]) -> None:
    if "address" in order:
        address, host = order["address"]
        owners[bytes(map(int, str(address).split(".")))] = int(str(host))
    else:
        source, target, delay_s, bytes_per_s, loss, cut = order["rule"]
        rule = LinkRule(float(str(delay_s)), float(str(bytes_per_s)), float(str(loss)), bool(cut))
        wires.rule(int(str(source)), int(str(target)), rule)


if __name__ == "__main__":
    run([int(word) for word in sys.argv[1:]])
