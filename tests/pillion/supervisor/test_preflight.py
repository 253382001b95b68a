"""What cannot work is refused before any process starts, in one line that names the flag and its origin."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pathlib
import re
import socket
import subprocess

import click
import pytest

from lab.testbed.certs import make_certs
from lab.testbed.conditions import until
from lab.testbed.ports import free_port
from lab.testbed.redis import running_redis
from lab.testbed.tiny_model import save_tokenizer
from pillion.cli.app import cli
from pillion.config import ServeFlags
from pillion.errors import ConfigError
from pillion.supervisor import local_cluster, preflight
from pillion.supervisor.preflight import ask_redis, wait_for_redis
from tests.support.notices import RecordedNotices


@pytest.fixture
def model(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder that looks like a model before a start; no process may start in its test."""
    monkeypatch.setattr(local_cluster.ChildProcess, "start", lambda *_: pytest.fail("a process was started"))
    for name in [name for name in os.environ if name.startswith("PILLION_")]:
        monkeypatch.delenv(name)
    (tmp_path / "model").mkdir()
    save_tokenizer(tmp_path / "model")
    return str(tmp_path / "model")


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        cli.main([*argv, "--http-port", "0", "--grpc-port", "0"], standalone_mode=False)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--api-keys", "/nowhere.toml"], "--api-keys: keys file /nowhere.toml: No such file"),
        (["--tls-cert", "/no.pem", "--tls-key", "/no.key"], "--tls-cert, --tls-key: TLS: /no.pem: No such file"),
        (
            [f"--internal-tls-{name}=/no.pem" for name in ("cert", "key", "ca")],
            "--internal-tls-cert, --internal-tls-key, --internal-tls-ca: TLS: /no.pem: No such file",
        ),
        (["--also-model", "b=/no/model"], "--also-model: /no/model is neither a local file or folder"),
        (["--disk-path", "/proc/pillion"], "--disk-path /proc/pillion: No such file"),
        (["--lora-modules", "x=/nope", "--enable-lora"], "--lora-modules x: /nope is not an adapter"),
        (["--lora-modules", "a=b", "--lora-modules", "a=c", "--enable-lora"], "two adapters are called 'a'"),
        (["--object-url", "https://bucket"], "--object-url does not begin with s3://"),
        (["--record-path", "redis"], "--record-path redis needs --record-key-file"),
        (["--host", "203.0.113.7"], "--host 203.0.113.7 is not an address of this machine"),
        (["--metrics-host", "203.0.113.7", "--metrics-port", "9"], "--metrics-host 203.0.113.7 is not an address"),
        (["--metrics-port", "65534"], "--metrics-port 65536 on 127.0.0.1 cannot be used: ports end at 65535"),
        (["--redis-url", "http://x"], "--redis-url http://x: choose redis://"),
    ],
)
def test_unusable_paths(model: str, flags: list[str], complaint: str) -> None:
    assert complaint in refusal("serve", model, *flags)


# A value of each flag that names a file or folder, with a path that cannot be used, and the flags that it needs.
INTERNAL = ["--internal-tls-cert=/proc/nope", "--internal-tls-key=/proc/nope", "--internal-tls-ca=/proc/nope"]
PATHS = {
    "model": ["--model", "/proc/nope"],
    "also_model": ["--also-model", "b=/proc/nope"],
    "tokenizer": ["--tokenizer", "/proc/nope"],
    "chat_template": ["--chat-template", "/proc/nope"],
    "generation_config": ["--generation-config", "/proc/nope"],
    "speculative_config": ["--speculative-config", '{"model": "/proc/nope", "num_speculative_tokens": 2}'],
    "api_keys": ["--api-keys", "/proc/nope"],
    "tls_cert": ["--tls-cert", "/proc/nope", "--tls-key", "/proc/nope"],
    "tls_key": ["--tls-cert", __file__, "--tls-key", "/proc/nope"],
    "tls_ca": ["--tls-cert", "/proc/nope", "--tls-key", "/proc/nope", "--tls-ca", "/proc/nope"],
    "disk_path": ["--disk-path", "/proc/nope"],
    "batch_path": ["--batch-path", "/proc/nope"],
    "record_path": ["--record-path", "/proc/nope"],
    "record_key_file": ["--record-path", "redis", "--record-key-file", "/proc/nope"],
    "lora_modules": ["--enable-lora", "--lora-modules", "x=/proc/nope"],
    "lora_path": ["--enable-lora", "--allow-runtime-lora-updating", "--lora-path", "/proc/nope"],
    "internal_tls_cert": INTERNAL,
    "internal_tls_key": INTERNAL,
    "internal_tls_ca": INTERNAL,
}
NAMES_A_PATH = re.compile(r"\b(folder|file|PEM|PATH|drafted)\b|_path$|_file$", re.IGNORECASE)
# Flags that speak of paths and name none.
OTHERS = {"root_path", "served_model_name", "allow_runtime_lora_updating"}
OTHERS |= {"disk_bytes"}


@pytest.mark.parametrize("field", PATHS)
def test_every_path_is_checked_before_the_start(model: str, field: str) -> None:
    said = refusal("serve", *([] if field == "model" else [model]), *PATHS[field])
    assert "--" + field.replace("_", "-") in said
    assert "/proc/nope" in said or field == "tls_key"


def test_every_path_flag_is_listed() -> None:
    named = {
        one.name
        for one in dataclasses.fields(ServeFlags)
        if NAMES_A_PATH.search(f"{one.metadata['help']} {one.name}") and not one.metadata["placement"]
    }
    assert named - OTHERS <= PATHS.keys()


def test_a_model_that_is_not_there(model: str) -> None:
    said = refusal("serve", f"{model}-not")
    assert said.startswith(f"--model: {model}-not is neither a local file or folder")
    assert said.endswith(f"; did you mean {model}?")
    assert refusal("serve", "demoo").endswith("; did you mean demo?")


def test_stored_formats_are_no_values_of_quantization(model: str) -> None:
    with pytest.raises(click.BadParameter) as caught:
        cli.main(["serve", model, "--quantization", "awq"], standalone_mode=False)
    assert "needs no flag" in caught.value.message
    assert "needs no flag" in refusal("serve", model, "--also-model", f"b={model},quantization=gptq")


def test_certificates_that_cannot_be_used(model: str, tmp_path: pathlib.Path) -> None:
    for name in ("one", "two"):
        make_certs(tmp_path / name)
    one, two = tmp_path / "one", tmp_path / "two"
    late = ("openssl", "x509", "-req", "-in", "a.csr", "-signkey", "a.key", "-days", "-1", "-out", "a.pem")
    new = "openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout a.key -out a.csr"
    for argv in ((*new.split(), "-subj", "/CN=a"), late):
        subprocess.run(argv, cwd=tmp_path, check=True, capture_output=True)
    config, expired = f"{model}/tokenizer.json", tmp_path / "a.pem"
    cases = {
        (config, one / "server.key", ""): f"{config} has no certificate in PEM",
        (one / "server.key", one / "server.pem", ""): f"{one}/server.key has no certificate in PEM",
        (one / "server.pem", config, ""): f"{config} has no private key in PEM",
        (one / "server.pem", two / "server.key", ""): (
            f"the private key {two}/server.key does not match the certificate {one}/server.pem"
        ),
        (expired, tmp_path / "a.key", ""): f"{expired}: certificate has expired",
        (one / "server.pem", one / "server.key", config): f"{config} has no certificate in PEM",
        (one / "server.pem", one / "server.key", expired): f"{expired} has expired: its last certificate was valid",
    }
    for (cert, key, ca), complaint in cases.items():
        own = ["--tls-cert", str(cert), "--tls-key", str(key), *(["--tls-ca", str(ca)] if ca else [])]
        flags = ", ".join(own[::2])
        assert refusal("serve", model, *own).startswith(f"{flags}: TLS: {complaint}")
        if ca:
            inner = [word.replace("--", "--internal-") for word in own]
            flags = ", ".join(inner[::2])
            assert refusal("serve", model, *inner).startswith(f"{flags}: TLS: {complaint}")


def test_a_metrics_port_in_use_is_rejected(model: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"--metrics-port {port} on 127.0.0.1 cannot be used" in refusal("serve", model, "--metrics-port", port)


def test_an_error_names_the_variable_or_config_line_that_set_the_flag(
    model: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pillion.toml"
    file.write_text('# Ours.\nblock-size = 16\napi_keys = "/nowhere.toml"\n')
    assert refusal("serve", model, "--config", str(file)).endswith(f"(--api-keys is set by line 3 of {file})")
    monkeypatch.setenv("PILLION_API_KEYS", "/elsewhere.toml")
    assert refusal("serve", model, "--config", str(file)).endswith("(--api-keys is set by PILLION_API_KEYS)")
    assert "is set by" not in refusal("serve", model, "--api-keys", "/here.toml")
    monkeypatch.setenv("PILLION_BLOCK_SIZE", "0")
    assert refusal("serve", model).startswith("--block-size 0 is less than 1 (--block-size is set by PILLION_BLOCK_S")


async def test_a_dead_redis_is_reported_and_waited_for_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "REDIS_WAIT_MS", 300)
    monkeypatch.setattr(preflight, "REDIS_POLL_MS", 10)
    notices, url = RecordedNotices(), f"redis://:secret@127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match=r"no Redis answers there .*; start it, or omit --redis-url") as caught:
        await wait_for_redis(url, notices)
    [line] = notices.lines
    assert "waiting for it up to" in line
    assert "secret" not in line + caught.value.message


async def test_a_redis_that_comes_in_time_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "REDIS_WAIT_MS", 60_000)
    monkeypatch.setattr(preflight, "REDIS_POLL_MS", 10)
    with running_redis() as redis:
        assert await ask_redis(redis.url) == ""
        redis.kill()
        notices = RecordedNotices()
        waiting = asyncio.create_task(wait_for_redis(redis.url, notices))
        await until("the word", lambda: notices.lines)
        redis.start()
        await waiting
