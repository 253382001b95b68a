"""Which components a drill strikes, when it refuses, and how a signal reaches a process."""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from pillion.drill.strikes import Striker, process_at, refusals, victims, with_sockets
from pillion.errors import ConfigError, Unavailable
from pillion.supervisor.runtime_dir import RuntimeDir, is_supervised
from pillion.types import ComponentStatus


def component(name: str, **fields: Any) -> ComponentStatus:
    role = "kvnode" if name.startswith("kv") else name.partition("-")[0]
    model = "toy" if role in ("prefill", "decode") else ""
    return ComponentStatus(component_id=name, **{"role": role, "model": model, "address": "10.0.0.1:1"} | fields)


def cluster(*names: str) -> list[ComponentStatus]:
    return [component(name) for name in names]


PAIRS = ("kv-0", "kv-1", "prefill-0", "prefill-1", "decode-0", "decode-1", "gateway-0", "gateway-1")
SUPERVISED = Striker("kill {component}", supervised=True)


@pytest.mark.parametrize(
    ("components", "kinds", "struck"),
    [
        (cluster(*PAIRS), ("gateway", "decode", "prefill", "kvnode"), "gateway-0 decode-0 prefill-0 kv-0"),
        (cluster("kv-0", "decode-0", "gateway-0"), ("gateway", "decode", "kvnode"), "decode-0 kv-0"),
        ([component("decode-0"), component("decode-1", running_requests=2)], ("decode",), "decode-1"),
        (cluster(*PAIRS), ("kvnode",), "kv-0"),
    ],
)
def test_the_busiest_of_each_kind_is_struck(
    components: list[ComponentStatus], kinds: tuple[str, ...], struck: str
) -> None:
    assert [one.component_id for one in victims(components, kinds)] == struck.split()


@pytest.mark.parametrize(
    ("components", "striker", "said"),
    [
        (cluster(*PAIRS), Striker("kill {component}"), ""),
        (cluster("kv-0", "decode-0"), SUPERVISED, ""),
        (cluster("kv-0", "decode-0"), Striker("kill {component}", "start {component}"), ""),
        (cluster(*PAIRS[1:]), Striker("kill {component}"), "kv-1 is the only kvnode component, and nothing"),
        (
            [*cluster(*PAIRS[:5]), component("decode-1", model="other")],
            Striker("kill {component}"),
            "decode-0 is the only decode component of model toy",
        ),
        (cluster(*PAIRS[:5]), Striker("kill {component}"), "decode-0 is the only decode"),
        (cluster("gateway-0"), SUPERVISED, "no component to strike"),
        ([*cluster(*PAIRS), component("decode-2", role="down", trouble="why")], SUPERVISED, "decode-2 is down: why"),
        ([*cluster(*PAIRS), component("kv-2", fenced_components=("decode-9",))], SUPERVISED, "decode-9 is fenced by"),
        ([component("decode-0;x"), component("decode-1")], SUPERVISED, "cannot be inserted into a command"),
        (cluster(*PAIRS), Striker(), "decode-0 (10.0.0.1:1) is not a process of this user's"),
    ],
)
def test_invalid_drills_are_rejected(components: list[ComponentStatus], striker: Striker, said: str) -> None:
    found = "\n".join(refusals(components, victims(components), striker))
    assert said in found if said else not found, found


@pytest.fixture
def runtime(tmp_path: pathlib.Path) -> Iterator[RuntimeDir]:
    directory = RuntimeDir.create(tmp_path)
    yield directory
    directory.remove()


def listener(path: pathlib.Path) -> subprocess.Popen[bytes]:
    """A process that listens at a Unix socket."""
    program = (
        "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen();"
        " print('listens', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


def test_a_local_component_is_the_process_at_its_socket(runtime: RuntimeDir) -> None:
    path = runtime.path / "decode-0.sock"
    one = component("decode-0", address=f"unix:{path}")
    with pytest.raises(Unavailable, match="no process listens"):
        Striker().check(one)
    process = listener(path)
    try:
        assert process_at(path) == process.pid
        Striker().check(one)
        assert Striker().starts_again(one)
        Striker().send(one, signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
        with pytest.raises(Unavailable, match="decode-0 cannot be struck"):
            Striker().send(one, signal.SIGKILL)
        Striker().send(one, signal.SIGCONT)
    finally:
        process.kill()
        process.wait()


def test_only_components_of_a_live_supervisor_are_struck(runtime: RuntimeDir, tmp_path: pathlib.Path) -> None:
    """A gateway is found next to the workers of its supervisor, and so is Redis."""
    names = ("decode-0", "gateway-0", "redis", "keeper")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "other.sock"))
        links = [socket.socket(socket.AF_UNIX) for _ in names]
        for name, link in zip(names, links, strict=True):
            link.bind(str(runtime.path / f"{name}.sock"))
        known = [component("decode-0", address=f"unix:{runtime.path}/decode-0.sock"), component("gateway-0")]
        found = with_sockets(known)
        stranger = component("decode-9", address=f"unix:{tmp_path}/other.sock")
        for link in links:
            link.close()
    assert [one.component_id for one in found] == ["decode-0", "gateway-0", "redis"]
    assert {os.path.dirname(one.address) for one in found} == {f"unix:{runtime.path}"}
    assert with_sockets([stranger]) == [stranger]
    with pytest.raises(ConfigError, match="is not a process of this user's"):
        Striker().check(stranger)
    assert is_supervised(runtime.path)
    runtime.remove()
    assert not is_supervised(runtime.path)


def test_strike_commands_get_the_component_and_run_without_a_shell(tmp_path: pathlib.Path) -> None:
    said = tmp_path / "said"
    program = 'import sys; open(sys.argv[1], "a").write(" ".join(sys.argv[2:]) + chr(10))'
    write = f"{sys.executable} -c '{program}' {said}"
    striker = Striker(f"{write} {{signal}} {{role}}/{{component}} $HOME", f"{write} start {{component}}")
    striker.send(component("kv-0"), signal.SIGSTOP)
    striker.start_again(component("kv-0"))
    assert said.read_text().splitlines() == ["SIGSTOP kvnode/kv-0 $HOME", "start kv-0"]
    for command, why in ((f"{sys.executable} -c 'raise SystemExit(\"no\")'", "status 1: no"), ("/no/such", "No such")):
        with pytest.raises(Unavailable, match=why):
            Striker(command).send(component("kv-0"), signal.SIGKILL)
