"""Several gateways behind one port: who may have the port, each one's flags, and the models they serve."""

from __future__ import annotations

import pathlib
import socket

import pytest

from pillion.cli.checks import check_flags
from pillion.config import GatewayFlags, ServedModelFlags, ServeFlags
from pillion.errors import ConfigError
from pillion.settings.served_models import other_models
from pillion.supervisor.gateway_processes import PublicPorts, gateway_specs


def listener(port: int, *, share: bool) -> socket.socket:
    return socket.create_server(("127.0.0.1", port), reuse_port=share)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_port_in_use_is_rejected_at_start(workers: int, share: bool) -> None:
    """Even if that server would share it: its clients and ours would be mixed."""
    with listener(0, share=share) as taken:
        flags = ServeFlags(gateway_workers=workers, grpc_port=taken.getsockname()[1], http_port=0)
        ports = PublicPorts()
        with pytest.raises(ConfigError, match=f"--grpc-port {flags.grpc_port} on 127.0.0.1 cannot be used"):
            ports.reserve(flags)
        ports.close()


def test_reserved_ports_accept_no_connection() -> None:
    ports = PublicPorts()
    flags = ports.reserve(ServeFlags(gateway_workers=2, grpc_port=0, http_port=0))
    assert flags.grpc_port
    assert flags.http_port
    try:
        with pytest.raises(OSError, match="in use"):
            listener(flags.http_port, share=False)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", flags.http_port))
        # What holds the port gets nothing, so every connection reaches a process that listens.
        with listener(flags.http_port, share=True) as one, listener(flags.http_port, share=True) as two:
            for server in (one, two):
                server.settimeout(0)
            got = {one: 0, two: 0}
            for _ in range(64):
                socket.create_connection(("127.0.0.1", flags.http_port)).close()
            for server in got:
                while True:
                    try:
                        server.accept()[0].close()
                    except BlockingIOError:
                        break
                    got[server] += 1
            assert sum(got.values()) == 64
            assert min(got.values()) > 0
    finally:
        ports.close()
    listener(flags.http_port, share=False).close()


def test_one_gateway_reserves_no_port() -> None:
    ports = PublicPorts()
    flags = ports.reserve(ServeFlags(grpc_port=0, http_port=0))
    listener(flags.grpc_port, share=False).close()
    ports.close()


def test_each_gateway_has_a_name_and_a_socket_of_its_own() -> None:
    flags = ServeFlags(model="m", gateway_workers=2, drain_timeout_s=7.0, also_model=("b=/b", "c=/c"))
    specs = gateway_specs(flags, pathlib.Path("/run/x"), {}, level=3)
    assert [(spec.component_id, spec.level, spec.drain_s) for spec in specs] == [
        ("gateway-0", 3, 7.0),
        ("gateway-1", 3, 7.0),
    ]
    for number, spec in enumerate(specs):
        arguments = {f"--component-id=gateway-{number}", f"--probe-listen=unix:/run/x/gateway-{number}.sock"}
        arguments |= {"--share-ports", "--gateway-workers=1", "--also-model=b=/b", "--also-model=c=/c"}
        assert arguments <= set(spec.argv)
        assert spec.alive is not None


def test_no_child_shows_a_key_on_its_command_line() -> None:
    flags = ServeFlags(model="m", gateway_workers=2, api_key=("plain-one", "plain-two"))
    assert "plain-" not in repr(flags)
    for spec in gateway_specs(flags, pathlib.Path("/run/x"), {"HOME": "/"}, level=3):
        assert "plain-" not in " ".join(spec.argv)
        assert spec.environ == {"HOME": "/", "PILLION_API_KEY": "plain-one plain-two"}


def test_additional_models_inherit_and_override_flags() -> None:
    flags = GatewayFlags(
        model="/a", dtype="float32", max_model_len=100, also_model=("b=/x/b", "c=hub/c,max-model-len=4K,revision=v2")
    )
    assert other_models(flags) == (
        ServedModelFlags(model="/x/b", served_model_name=("b",), dtype="float32"),
        ServedModelFlags(model="hub/c", served_model_name=("c",), dtype="float32", max_model_len=4000, revision="v2"),
    )
    assert other_models(GatewayFlags()) == ()


@pytest.mark.parametrize(
    ("also", "complaint"),
    [
        (("/models/b",), "write NAME=MODEL"),
        (("=b",), "write NAME=MODEL"),
        (("b=",), "write NAME=MODEL"),
        (("b=/b,speed=1",), "'speed=1' is not one of dtype, max-model-len, quantization"),
        (("b=/b,quantization=nf4",), "'nf4' is not one of none, int8, int8-dynamic, int4"),
        (("b=/b,dtype",), "'dtype' is not one of"),
        (("b=/b,dtype=int4",), "'int4' is not one of auto"),
        (("b=/b,max-model-len=long",), "'long' is not a size"),
        (("b=/b", "b=/c"), "two models are called 'b'"),
        (("a=/b",), "two models are called 'a'"),
        (tuple(f"m{n}=/m" for n in range(64)), "at most 64 models"),
    ],
)
def test_invalid_models_are_one_line_errors(also: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        check_flags(ServeFlags(model="/a", served_model_name=("a",), also_model=also))
    assert "\n" not in caught.value.message
