"""The commands that a start prints, for flags that change how a cluster is reached."""

from __future__ import annotations

import json
import pathlib
import sys
from dataclasses import replace
from typing import Any

import pytest

from lab.testbed.tiny_model import save_model
from pillion.config import ServeFlags
from pillion.engine.backends.cpu import cpu_loading
from pillion.engine.backends.devices import resolved
from pillion.engine.backends.step_memory import steps_bytes
from pillion.engine.checkpoints.model_cache import ModelCache
from pillion.engine.checkpoints.prepare import prepare
from pillion.kernels.cpu.language.isa import TABLE
from pillion.supervisor import start_lines
from pillion.supervisor.local_cluster import prepared_model
from pillion.supervisor.start_lines import own_command, show_addresses, show_model
from tests.support import fake_backend
from tests.support.notices import RecordedNotices

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
TLS = {"tls_cert": "c", "tls_key": "k"}


@pytest.mark.parametrize(
    ("flags", "curl", "chat"),
    [
        ({}, "curl http://127.0.0.1:8000/v1/completions JSON -d", "chat"),
        (
            {"host": "::1", "http_port": 9, "grpc_port": 8},
            "curl http://[::1]:9/v1/completions JSON -d",
            "chat --target [::1]:8",
        ),
        ({"host": "0.0.0.0"}, "curl http://127.0.0.1:8000/v1/completions JSON -d", "chat"),
        ({"api_keys": "k"}, "completions JSON -H 'Authorization: Bearer KEY' -d", "PILLION_API_KEY=KEY"),
        (TLS, "curl https://127.0.0.1:8000/v1/completions JSON --cacert", "chat --target grpcs://127.0.0.1:50051 --ca"),
        (TLS | {"tls_ca": "a"}, "--cacert CA.pem --cert CLIENT.pem --key CLIENT.key -d", "--cert CLIENT.pem --key"),
        ({"also_model": ("b=/b",), "model": "/a b"}, '"model": "/a b"}', "chat"),
    ],
)
def test_the_start_prints_commands_that_reach_the_cluster(flags: dict[str, Any], curl: str, chat: str) -> None:
    class Printed(RecordedNotices):
        def command(self, text: str) -> None:
            self.lines.append(text)

    notices = Printed()
    show_addresses(notices, ServeFlags(**flags), 1.0)
    ready, *commands = notices.lines
    assert ready.startswith("ready: after 1.0 s: gRPC ")
    assert curl in commands[0].replace("-H 'Content-Type: application/json'", "JSON")
    assert f"{own_command()} chat" in commands[1]
    assert chat in commands[1]


def test_the_start_names_the_parsers(tmp_path: pathlib.Path) -> None:
    template = "{% if tools %}<tool_call>{% endif %}{{ messages }}<think></think>"
    folder = save_model(tmp_path / "tiny", template=template)
    flags = ServeFlags(model=str(folder), dtype="float32")
    notices = RecordedNotices()
    show_model(notices, flags, prepare(flags), None, 1)
    assert notices.lines[0].endswith("tool call parser: hermes, reasoning parser: qwen3")


def test_the_start_names_the_processes_of_a_worker(tmp_path: pathlib.Path) -> None:
    flags = ServeFlags(model=str(save_model(tmp_path / "tiny")), dtype="float32", device="cpu", prefill_workers=1)
    for more, words in (
        ({}, "prefill workers: 1, decode workers: 1, threads"),
        ({"tensor_parallel_size": 2}, "decode workers: 1, of 2 and 2 processes, threads"),
        ({"prefill_tensor_parallel_size": 2}, "decode workers: 1, of 2 and 1 processes, threads"),
        ({"pipeline_parallel_size": 2}, "decode workers: 1, prefill workers of 2 stages, threads"),
    ):
        notices = RecordedNotices()
        show_model(notices, replace(flags, **more), prepare(flags), None, 1)
        assert words in " ".join(notices.lines)


def test_the_start_counts_the_weights_of_all_ranks(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank of each size maps its own file."""
    monkeypatch.setenv("PILLION_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_loading, "choose_kernels", lambda *_: (TABLE[0], ""))
    flags = ServeFlags(model=str(save_model(tmp_path / "tiny")), dtype="float32", device="cpu", prefill_workers=1)
    prepared, cache = prepare(flags), ModelCache()
    for name, size_bytes in (("cpu", 4096), ("cpu0of2", 2048), ("cpu1of2", 1024)):
        cache.packed_weights(prepared.fingerprint, name).write_bytes(bytes(size_bytes))
    for more, words in (
        ({}, "; weights 4 KiB, shared by all workers"),
        ({"tensor_parallel_size": 2}, "; weights 3 KiB, shared by all workers"),
        ({"prefill_tensor_parallel_size": 2}, "; weights 7 KiB, shared by the workers of each size"),
    ):
        notices = RecordedNotices()
        show_model(notices, replace(flags, **more), prepared, None, 1)
        assert notices.lines[-1].endswith(words)


def test_the_start_logs_step_budgets(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILLION_CACHE", str(tmp_path / "cache"))
    given = ServeFlags(model=str(save_model(tmp_path / "model")), device="cpu", dtype="float32", kv_pool_bytes=2**24)
    for more, words in (
        ({}, "max tokens per step: 512 (prefill), 256 (decode), which take up to"),
        ({"prefill_workers": 0}, "max tokens per step: 256 (decode), which take up to"),
        ({"max_num_batched_tokens": 65_536}, "512 (prefill), 65,536 (decode), which take up to"),
    ):
        flags = resolved(replace(given, **more))  # type: ignore[arg-type]
        prepared, fit = prepared_model(flags)
        assert fit is not None
        assert fit.step_bytes == steps_bytes(flags, prepared) > 0
        notices = RecordedNotices()
        show_model(notices, flags, prepared, fit, 1)
        assert words in notices.lines[-1]


def test_eight_bit_kv_is_named_and_needs_half_the_pool(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILLION_CACHE", str(tmp_path / "cache"))
    model, tokens = str(save_model(tmp_path / "model", head_dim=64)), []
    for kv in ("auto", "fp8"):
        flags = ServeFlags(model=model, device="cpu", dtype="bfloat16", kv_cache_dtype=kv, kv_pool_bytes=2**24)
        prepared, fit = prepared_model(flags)
        assert fit is not None
        tokens.append(fit.total_tokens)
        notices = RecordedNotices()
        show_model(notices, flags, prepared, fit, 1)
        assert ("KV in fp8" in "".join(notices.lines)) == (kv == "fp8")
    # Of 64 values in bfloat16, and in 8 bits with a scale of 4 bytes.
    assert tokens[1] / tokens[0] == pytest.approx(128 / 68, rel=0.01)


def test_the_printed_command_works_from_the_current_folder(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a clone" / ".venv" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setattr(start_lines.shutil, "which", lambda _: None)
    monkeypatch.chdir(tmp_path / "a clone")
    assert own_command() == ".venv/bin/python -m pillion"
    (folder / "pillion").touch()
    assert own_command() == ".venv/bin/pillion"
    monkeypatch.chdir(tmp_path)
    assert own_command() == "'a clone/.venv/bin/pillion'"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert own_command() == f"'{folder}/pillion'"
    monkeypatch.setattr(start_lines.shutil, "which", lambda _: str(folder / "pillion"))
    assert own_command() == "pillion"


def test_the_format_of_quantized_weights_is_named(tmp_path: pathlib.Path) -> None:
    config = {**LLAMA, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    notices, flags = RecordedNotices(), ServeFlags(dtype="float32", device="cuda")
    show_model(notices, flags, fake_backend.prepared_model(folder=str(tmp_path)), None, 1)
    assert notices.lines[1] == "type: float32, for --dtype float32; weights: awq, 4 bits in groups of 128"
