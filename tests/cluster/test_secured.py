"""A secured cluster: components on TCP with mutual TLS, and `pillion serve` with keys and certificates."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from lab.testbed.certs import make_certs
from lab.testbed.cluster import PATIENT_MS, QUIET, READY_TIMEOUT_S, ServedCluster
from lab.testbed.conditions import WITHIN_S, until, wait_for
from lab.testbed.defaults import defaults_environment
from lab.testbed.faults.board import hook_path
from lab.testbed.ports import free_port
from lab.testbed.redis import running_redis
from lab.testbed.tiny_model import save_model
from pillion import AsyncClient, Client, Unauthenticated, Unavailable
from pillion.cli.keys import add_key
from pillion.config import DecodeFlags, GatewayFlags, KVNodeFlags, PrefillFlags
from pillion.net import rpc
from pillion.net.tls import INTERNAL_NAME, Identity, TlsFiles

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")

PROMPT = list(range(2, 91))


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("secured") / "certs"
    make_certs(folder)
    return folder


@pytest.fixture
def identity(certs: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """Give every component of this process the components' certificate, in its own folder."""
    for name in ("internal.pem", "internal.key", "internal-ca.pem"):
        shutil.copy(certs / name, tmp_path)
    files = TlsFiles(*(str(tmp_path / name) for name in ("internal.pem", "internal.key", "internal-ca.pem")))
    monkeypatch.setattr("pillion.net.watched.AT_REST_S", -1.0)
    rpc.use_identity(Identity(files, interval_s=0.0))
    yield tmp_path
    rpc.use_identity(None)


@contextlib.asynccontextmanager
async def parts_on_tcp(folder: pathlib.Path, model: dict[str, Any], edge: dict[str, Any]) -> AsyncIterator[Any]:
    """Run the gateway before real workers that it reaches over TCP; yield it and the workers' addresses."""
    from pillion.decode_service.assemble import start_decode
    from pillion.gateway.assemble import start_gateway
    from pillion.kvstore.assemble import start_kvnode
    from pillion.prefill_service.assemble import start_prefill

    async with contextlib.AsyncExitStack() as stack:
        url = stack.enter_context(running_redis()).url
        common = {"redis_url": url, "heartbeat_ms": 100, "heartbeat_timeout_ms": PATIENT_MS}
        attach = {"attach_socket": str(folder / "a.sock")}
        node = await start_kvnode(KVNodeFlags(**common, **attach, node_listen="127.0.0.1:0"))
        stack.push_async_callback(node.stop)
        addresses = [node.address]
        worker = {**common, **model, **attach, "cpu_threads": 1, "listen": "127.0.0.1:0"}
        for start, cls, name in ((start_prefill, PrefillFlags, "prefill-0"), (start_decode, DecodeFlags, "decode-0")):
            component = await start(cls(**worker, component_id=name))
            addresses.append(component.address)
            stack.push_async_callback(component.stop)
        gateway = await start_gateway(GatewayFlags(**common, **model, **edge, http_port=0, grpc_port=0, chunk_size=32))
        stack.push_async_callback(gateway.stop)
        assert all(address.startswith("127.0.0.1:") for address in addresses)
        yield gateway, addresses


async def let_in(address: str, certs: pathlib.Path, name: str) -> bool:
    """Return whether a component answers a call with the certificate ``name``, or without one ("")."""
    trusted = (certs / "internal-ca.pem").read_bytes()
    own = [(certs / f"{name}.{kind}").read_bytes() for kind in ("key", "pem")] if name else []
    options = [("grpc.ssl_target_name_override", INTERNAL_NAME)]
    async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(trusted, *own), options) as channel:
        try:
            await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=WITHIN_S)
        except grpc.aio.AioRpcError:
            return False
        return True


async def test_components_with_mutual_tls(certs: pathlib.Path, identity: pathlib.Path) -> None:
    model = {"model": str(save_model(identity / "tiny")), "dtype": "float32", "max_model_len": 512}
    edge = {"tls_cert": str(certs / "server.pem"), "tls_key": str(certs / "server.key")}
    asked = {"max_tokens": 8, "ignore_eos": True, "temperature": 0.0}
    async with contextlib.AsyncExitStack() as stack:
        short = stack.enter_context(tempfile.TemporaryDirectory(prefix="pil-"))
        secured = parts_on_tcp(pathlib.Path(short), model, {**edge, "split_policy": "disaggregated"})
        gateway, addresses = await stack.enter_async_context(secured)
        for address in addresses:
            assert [await let_in(address, certs, name) for name in ("", "client", "server")] == [False] * 3
            assert await let_in(address, certs, "internal")
        target = f"grpcs://{gateway.grpc_address}"
        client = await stack.enter_async_context(AsyncClient(target, ca=certs / "ca.pem"))

        async def known() -> bool:
            roles = {component.role for component in (await client.status()).components}
            return bool(await client.models()) and roles >= {"prefill", "decode"}

        await until("the gateway to know the model and both workers", known)
        first = [delta async for delta in client.generate(PROMPT, **asked)]
        assert sum(len(delta.token_ids) for delta in first) == 8
        assert first[-1].timings.prefill_chunks > 0
        renewed = identity / "renewed"
        renewed.mkdir()
        _reissue(certs, renewed)
        for file in ("internal.key", "internal.pem"):
            os.replace(renewed / file, identity / file)
        again = [delta async for delta in client.generate(PROMPT, **asked)]
        assert again[-1].usage.cached_tokens == 80
        assert [i for delta in again for i in delta.token_ids] == [i for delta in first for i in delta.token_ids]


def _reissue(certs: pathlib.Path, folder: pathlib.Path) -> None:
    """Write a new key and certificate of the components' authority."""
    (folder / "config").write_text("[req]\ndistinguished_name=n\n[n]\n[x]\nsubjectAltName=DNS:pillion.internal\n")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-config", "config")
    ca = (
        "-CA",
        certs / "internal-ca.pem",
        "-CAkey",
        certs / "internal-ca.key",
        "-CAserial",
        "serial",
        "-CAcreateserial",
    )
    for words in (
        ("req", "-new", *key, "-keyout", "internal.key", "-out", "r.csr", "-subj", "/CN=renewed"),
        ("x509", "-req", "-in", "r.csr", *ca, "-out", "internal.pem", "-extfile", "config", "-extensions", "x"),
    ):
        subprocess.run(("openssl", *words), cwd=folder, check=True, capture_output=True)


def test_serve_with_keys_and_certificates(certs: pathlib.Path, tmp_path: pathlib.Path) -> None:
    model, keys, port = save_model(tmp_path / "tiny"), tmp_path / "keys.toml", free_port()
    key = add_key(keys, "acme")
    temporary, log = tmp_path / "t", tmp_path / "serve.log"
    temporary.mkdir()
    flags = [f"--tls-cert={certs}/server.pem", f"--tls-key={certs}/server.key", f"--tls-ca={certs}/ca.pem"]
    internal = [f"--internal-tls-{kind}={certs}/{file}" for kind, file in _INTERNAL]
    ports = [f"--grpc-port={port}", "--http-port=0", "--max-model-len=512", "--kv-pool-bytes=16MiB"]
    command = [sys.executable, "-m", "pillion", "serve", str(model), *ports, *flags, *internal, f"--api-keys={keys}"]
    environ = {**os.environ, "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"}
    environ |= defaults_environment(QUIET) | hook_path(environ)
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environ)
    cluster = ServedCluster(process, temporary, port, log)
    try:
        wait_for(
            "the cluster to be ready",
            lambda: process.poll() is not None or "chat --target" in log.read_text(),
            READY_TIMEOUT_S,
        )
        assert process.poll() is None, log.read_text()
        *_, curl, chat = log.read_text().splitlines()
        assert re.search(rf"PILLION_API_KEY=KEY \S*pillion chat --target grpcs://127.0.0.1:{port} --ca CA.pem", chat)
        assert "--cacert CA.pem --cert CLIENT.pem --key CLIENT.key -H 'Authorization: Bearer KEY'" in curl
        own = {"cert": certs / "client.pem", "key": certs / "client.key", "ca": certs / "ca.pem"}
        with Client(f"grpcs://127.0.0.1:{port}", **own, api_key=key) as client:
            assert "".join(delta.text for delta in client.generate("Once", max_tokens=4, ignore_eos=True)) is not None
        with Client(f"grpcs://127.0.0.1:{port}", **own, api_key="x" * 40) as wrong, pytest.raises(Unauthenticated):
            wrong.models()
        with Client(f"127.0.0.1:{port}", api_key=key) as plain, pytest.raises(Unavailable):
            plain.models()
        cli = [
            sys.executable,
            "-m",
            "pillion",
            "generate",
            "Once",
            "--max-tokens=4",
            f"--target=grpcs://127.0.0.1:{port}",
        ]
        reach = [f"--ca={certs}/ca.pem", f"--cert={certs}/client.pem", f"--key={certs}/client.key"]
        done = subprocess.run(
            [*cli, *reach],
            capture_output=True,
            text=True,
            env={**os.environ, "PILLION_API_KEY": key},
            timeout=READY_TIMEOUT_S,
        )
        assert done.returncode == 0, done.stderr
        assert cluster.stop() == 0
        assert not cluster.left_behind()
    finally:
        cluster.end()


_INTERNAL = (("cert", "internal.pem"), ("key", "internal.key"), ("ca", "internal-ca.pem"))
