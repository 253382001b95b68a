"""Hosts of network namespaces, with links that a test may make slow, narrow, lossy or cut.

    network("edge", "kv-a") --> a namespace with a TUN device per host, one device for the test itself,
                                and a process (lab/testbed/wire.py) that carries packets between them --> all removed

Needs root, Linux, iproute2, util-linux and /dev/net/tun; :func:`missing` names what is missing.
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
# Networks at once: each has its own third byte of 10.77.x.y.
MAX_NETWORKS = 250
# Addresses that a host can have, one after the other.
ADDRESSES_OF_A_HOST = 20
TEST = "test"


def missing() -> str:
    """Return what this machine lacks for such networks, "" for nothing."""
    if sys.platform != "linux" or os.geteuid():
        return "network namespaces need Linux and root"
    for program in ("ip", "nsenter"):
        if shutil.which(program) is None:
            return f"network namespaces need the program {program}"
    return "" if TUN.exists() else f"links between network namespaces need {TUN}"


class HostNetwork:
    """Hosts with links between them. The test itself is one more host, with perfect links.

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
        """Return a host's current IPv4 address."""
        host = self._all.index(name)
        return f"10.77.{self._number}.{1 + host * ADDRESSES_OF_A_HOST + self._turns[name]}"

    def enter(self, name: str) -> tuple[str, ...]:
        """Return the words before a command that make it run on a host."""
        return "nsenter", f"--net={self.namespace(name)}"

    def namespace(self, name: str) -> str:
        """Return the path of a host's network namespace."""
        return f"/run/netns/{self._namespace(name)}"

    def link(self, one: str, other: str, rule: LinkRule = PERFECT, back: LinkRule | None = None) -> None:
        """Apply a rule to the link between two hosts, with another one for the way ``back`` if given, and wait until
        they are in effect."""
        for source, target, which in ((one, other, rule), (other, one, rule if back is None else back)):
            ends = self._all.index(source), self._all.index(target)
            self._tell({"rule": [*ends, which.delay_s, which.bytes_per_s, which.loss, which.cut]})

    def links(self, rule: LinkRule = PERFECT) -> None:
        """Apply a rule to all links between hosts."""
        for at, one in enumerate(self.names):
            for other in self.names[at + 1 :]:
                self.link(one, other, rule)

    def counts(self) -> tuple[int, int]:
        """Return the numbers of carried and dropped packets."""
        return self._tell({"address": [self.address(TEST), 0]})

    def move(self, name: str) -> None:
        """Replace a host's address, as a new lease or a new pod does."""
        # Remove first: a second address of one network would go with the first.
        self._ip(name, "addr", "del", f"{self.address(name)}/24", "dev", DEVICE)
        self._turns[name] += 1
        self._settle(name)
        self._route(name)

    def open(self) -> None:
        """Make namespaces, devices and the process between them. Raises BusyNumber if another test uses these
        addresses."""
        devices = [_tun_device(None, self._test_device())]
        try:
            # The owner of the test's device owns the number: existing namespaces are of a killed test.
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
            # A route is lost if its address is set before the device is up.
            self._route(name)

    def close(self) -> None:
        """End the process, with which the devices go, and remove the namespaces. Idempotent."""
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
    """The number of another network."""


def _tun_device(namespace: pathlib.Path | None, name: str) -> int:
    """Make a TUN device in a namespace, or in this process's, and return its descriptor. Raises BusyNumber if the name
    is taken."""
    made: list[int | OSError] = []

    def make() -> None:
        # In a thread, since setns moves the calling thread and the device is made there.
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
    """Make a network of hosts with these names, and remove it."""
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
