"""Makes hosts of network namespaces, with links between them that a test may make slow, narrow, lossy or cut.

    network("edge", "kv-a") --> a namespace with a TUN device for each host, one more device for the test itself,
                                and a process (lab/testbed/wire.py) that carries packets between them --> all removed

It needs root, Linux, iproute2, util-linux and /dev/net/tun; :func:`missing` names what is not there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator

from lab.testbed.wire import MTU_BYTES, PERFECT, LinkRule

TUN = pathlib.Path("/dev/net/tun")
CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
DEVICE = "wire"
# Each network has its own third byte of 10.77.x.y, by which networks of tests that run at once are apart.
MAX_NETWORKS = 250
# What else may use the addresses of one host, one after the other.
ADDRESSES_OF_A_HOST = 20
TEST = "test"


def missing() -> str:
    """Returns what this machine lacks for such networks; "" where nothing is missing."""
    if sys.platform != "linux" or os.geteuid():
        return "network namespaces need Linux and root"
    for program in ("ip", "nsenter"):
        if shutil.which(program) is None:
            return f"network namespaces need the program {program}"
    return "" if TUN.exists() else f"links between network namespaces need {TUN}"


class HostNetwork:
    """Represents hosts with links between them. The test itself is one more host, whose links are perfect.

    Attributes:
        names: the hosts, without the test.
    """

    def __init__(self, names: tuple[str, ...], number: int) -> None:
        self.names = names
        self._number = number
        self._all = (TEST, *names)
        self._turns = dict.fromkeys(self._all, 0)
        self._wire: subprocess.Popen[bytes] | None = None

    def address(self, name: str) -> str:
        """Returns the IPv4 address that a host has now."""
        host = self._all.index(name)
        return f"10.77.{self._number}.{1 + host * ADDRESSES_OF_A_HOST + self._turns[name]}"

    def enter(self, name: str) -> tuple[str, ...]:
        """Returns the words before a command that make it run on a host."""
        return "nsenter", f"--net={self.namespace(name)}"

    def namespace(self, name: str) -> str:
        """Returns the path of a host's network namespace."""
        return f"/run/netns/{self._namespace(name)}"

    def link(self, one: str, other: str, rule: LinkRule = PERFECT, back: LinkRule | None = None) -> None:
        """Makes the link from one host to another one follow a rule, and the way back another one, if there is one.
        Both hold when this returns."""
        for source, target, which in ((one, other, rule), (other, one, rule if back is None else back)):
            ends = self._all.index(source), self._all.index(target)
            self._tell({"rule": [*ends, which.delay_s, which.bytes_per_s, which.loss, which.cut]})

    def links(self, rule: LinkRule = PERFECT) -> None:
        """Makes all links between hosts follow a rule."""
        for at, one in enumerate(self.names):
            for other in self.names[at + 1 :]:
                self.link(one, other, rule)

    def counts(self) -> tuple[int, int]:
        """Returns how many packets were carried and dropped."""
        return self._tell({"address": [self.address(TEST), 0]})

    def move(self, name: str) -> None:
        """Gives a host another address and takes the old one away, as a new lease or a new pod does."""
        # The other way round, the new one would go with the old one, as the second address of one network.
        self._ip(name, "addr", "del", f"{self.address(name)}/24", "dev", DEVICE)
        self._turns[name] += 1
        self._settle(name)
        self._route(name)

    def open(self) -> None:
        """Makes namespaces, devices and the process between them. Raises BusyNumber where another test has these
        addresses."""
        devices = [_tun_device(None, self._test_device())]
        try:
            # Whoever has the test's device has the number: namespaces of it are those of a test that was killed.
            self._remove_namespaces()
            for name in self.names:
                _run("ip", "netns", "add", self._namespace(name))
                devices.append(_tun_device(pathlib.Path("/run/netns", self._namespace(name)), DEVICE))
            self._wire = subprocess.Popen(
                [sys.executable, "-m", "lab.testbed.wire", *map(str, devices)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=devices,
                cwd=pathlib.Path(__file__).parents[2],
            )
        finally:
            for device in devices:
                os.close(device)
        for name in self._all:
            self._settle(name)
            self._ip(name, "link", "set", self._device(name), "mtu", str(MTU_BYTES), "up")
            if name != TEST:
                self._ip(name, "link", "set", "lo", "up")
            # An address that comes before its device is up brings no route.
            self._route(name)

    def close(self) -> None:
        """Ends the process, by which the devices go, and removes the namespaces. Idempotent."""
        wire, self._wire = self._wire, None
        if wire is not None:
            assert wire.stdin is not None
            assert wire.stdout is not None
            wire.stdin.close()
            wire.wait()
            wire.stdout.close()
        self._remove_namespaces()

    def _remove_namespaces(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", self._namespace(name)], check=False, capture_output=True)

    def _settle(self, name: str) -> None:
        self._ip(name, "addr", "add", f"{self.address(name)}/24", "dev", self._device(name))
        self._tell({"address": [self.address(name), self._all.index(name)]})

    def _tell(self, order: dict[str, list[object]]) -> tuple[int, int]:
        wire = self._wire
        assert wire is not None
        assert wire.stdin is not None
        assert wire.stdout is not None
        wire.stdin.write(json.dumps(order).encode() + b"\n")
        wire.stdin.flush()
        carried, dropped = wire.stdout.readline().split()
        return int(carried), int(dropped)

    def _ip(self, name: str, *words: str) -> None:
        place = () if name == TEST else ("-n", self._namespace(name))
        _run("ip", *place, *words)

    def _route(self, name: str) -> None:
        self._ip(name, "route", "replace", f"10.77.{self._number}.0/24", "dev", self._device(name))

    def _device(self, name: str) -> str:
        return self._test_device() if name == TEST else DEVICE

    def _test_device(self) -> str:
        return f"pilwire{self._number}"

    def _namespace(self, name: str) -> str:
        return f"pil{self._number}-{name}"


class BusyNumber(Exception):  # noqa: N818
    """Says that another network has this number."""


def _tun_device(namespace: pathlib.Path | None, name: str) -> int:
    """Makes a TUN device in a namespace, or in this process's; returns its descriptor. Raises BusyNumber where the name
    is taken."""
    made: list[int | OSError] = []

    def make() -> None:
        # A thread may be in another namespace than its process, and a device is made where its thread is.
        try:
            if namespace is not None:
                with namespace.open("rb") as there:
                    if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), f"setns to {namespace} failed")
            device = os.open(TUN, os.O_RDWR)
            try:
                fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
            except OSError:
                os.close(device)
                raise
            made.append(device)
        except OSError as error:
            made.append(error)

    maker = threading.Thread(target=make)
    maker.start()
    maker.join()
    (found,) = made
    if isinstance(found, OSError):
        if found.errno in (errno.EBUSY, errno.EEXIST):
            raise BusyNumber(name) from found
        raise found
    return found


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert not done.returncode, f"{' '.join(command)}: {done.stderr}"


@contextlib.contextmanager
def network(*names: str) -> Iterator[HostNetwork]:
    """Makes a network of hosts with these names, and removes it."""
    for number in range(1, MAX_NETWORKS):
        made = HostNetwork(names, number)
        try:
            made.open()
        except BusyNumber:
            continue
        except BaseException:
            made.close()
            raise
        break
    else:
        raise AssertionError(f"{MAX_NETWORKS} networks are there already")
    try:
        yield made
    finally:
        made.close()
