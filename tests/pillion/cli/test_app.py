"""The command as users meet it: fast to start, one line for every mistake, and children that get every flag."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import chain

import click
import pytest

from lab.testbed.conditions import WITHIN_S
from pillion._version import VERSION
from pillion.cli.app import cli, component_command, main, with_model
from pillion.cli.flags import FlagCommand
from pillion.cli.talk import (
    component_lines,
    explicit_options,
    model_line,
    pool_use,
    show,
    show_each,
    status_table,
    summary,
)
from pillion.config import PrepareFlags, ServeFlags
from pillion.engine.load_model import make_ready
from pillion.errors import ConfigError
from pillion.supervisor import component_process
from pillion.types import (
    ClusterStatus,
    ComponentStatus,
    Delta,
    FinishReason,
    ModelInfo,
    SamplingParams,
    TokenLogprob,
)
from tests.support.commands import Run, pillion_commands
from tests.support.processes import started

ROOT = pathlib.Path(__file__).resolve().parents[3]


def pillion(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the real command, with a fresh environment."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PILLION_")}
    return subprocess.run(
        [sys.executable, "-m", "pillion", *argv],
        stdin=subprocess.DEVNULL,
        env=clean | {"COLUMNS": "200"} | environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=ROOT,
    )


def test_importing_the_command_imports_nothing_heavy() -> None:
    script = (
        "import sys; import pillion.cli.app, pillion.supervisor.component_process, pillion.supervisor.local_cluster;"
        "print([name for name in ('torch', 'transformers', 'numpy', 'rich', 'redis', 'starlette', 'engine')"
        " if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["pillion", "pillion.client.client", "pillion.offline.llm"])
def test_the_sdk_imports_no_operator_tools(module: str) -> None:
    """Not even when its late names are used: `pillion.Client` and `pillion.LLM` are classes of these modules."""
    operators = {"cli", "supervisor", "top", "loadgen"}
    script = (
        f"import sys; import {module};"
        f"print([name for name in sys.modules if name.startswith('pillion.') and name.split('.')[1] in {operators}])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


@pytest.fixture(scope="module")
def command() -> Iterator[Run]:
    with pillion_commands() as run:
        yield run


def test_bare_commands_print_their_help_as_it_is_written(command: Run) -> None:
    for words in ([], ["keys"]):
        done = command(*words)
        assert done.returncode == 2
        assert done.stderr == command(*words, "--help").stdout
        assert len(done.stderr.splitlines()) > 5


def test_make_accepts_a_model_path_with_spaces(tmp_path: pathlib.Path) -> None:
    """The recipe of `make serve` passes MODEL as one word; a program that prints its words replaces Python."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "python"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    for name in (".made", ".torch", ".server"):
        (tmp_path / name).touch()
    asked = ["make", "-s", "serve", f"VENV={tmp_path}", 'MODEL=a model\'s "path"', "ARGS=--grpc-port 5"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["-m", "pillion", "serve", 'a model\'s "path"', "--grpc-port", "5"]


def test_help_lists_every_command() -> None:
    done = pillion("--help")
    assert done.returncode == 0
    for name in ("serve", "gateway", "prefill", "decode", "kvnode", "generate", "chat", "status", "version"):
        assert f"\n  {name} " in done.stdout
    assert pillion("version").stdout.startswith(f"pillion {VERSION} ")


@pytest.mark.parametrize(
    ("argv", "status", "complaint"),
    [
        (["serve", "--max-num-seqs", "many"], 2, "'many' is not a valid integer"),
        (["serve", "--block-size", "0"], 2, "--block-size 0 is less than 1"),
        (["serve", "a", "--model", "b"], 2, "give the model only once"),
        (["serve", "/nowhere/at/all"], 2, "/nowhere/at/all"),
        (["serve", "--config", "/nowhere.toml"], 2, "No such file"),
        (["decode", "/nowhere/at/all", "--attach-socket", "/nowhere/a.sock"], 2, "/nowhere/at/all"),
        (["frobnicate"], 2, "No such command"),
        (["generate", "Once", "--logit-bias", "5"], 2, "'5' is not ID=VALUE"),
        (["generate", "Once", "--logit-bias", "a=1"], 2, "'a=1' is not ID=VALUE"),
        (["chat", "--n", "2"], 2, "No such option"),
        (["status", "--target", "127.0.0.1:1"], 1, "127.0.0.1:1"),
        (["generate", "Once", "--target", "127.0.0.1:1"], 1, "127.0.0.1:1"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else None,
)
def test_user_errors_are_one_line_on_stderr(command: Run, argv: list[str], status: int, complaint: str) -> None:
    done = command(*argv)
    assert done.returncode == status
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("pillion: ")
    assert complaint in last
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_unusable_client_certificates_are_a_one_line_error(tmp_path: pathlib.Path, command: Run) -> None:
    from lab.testbed.certs import make_certs

    for name in ("one", "two"):
        make_certs(tmp_path / name)
    one, two, plain = tmp_path / "one", tmp_path / "two", tmp_path / "a.txt"
    plain.write_text("x")
    cases = {
        ("--ca", "/no/where"): "--ca: ca: /no/where: No such file",
        ("--ca", plain): f"--ca: ca: {plain} is no PEM",
        ("--cert", one / "client.pem", "--key", two / "client.key"): f"the private key {two}/client.key does not match",
        ("--cert", one / "client.key", "--key", one / "client.key"): "client.key has no certificate in PEM",
    }
    for words, complaint in cases.items():
        done = command("status", "--target", "grpcs://127.0.0.1:1", *map(str, words))
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert complaint in done.stderr
        assert done.stderr.startswith("pillion: --c")


def leaves(command: click.Command, *words: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield each command that is not a group, with its words."""
    if isinstance(command, click.Group):
        for name, one in command.commands.items():
            yield from leaves(one, *words, name)
    else:
        yield words, command


def test_missing_required_options_and_arguments_are_reported(command: Run) -> None:
    asked = set()
    for words, one in leaves(cli):
        required = [param for param in one.params if param.required]
        for missing in required:
            given = [param for param in required if param is not missing]
            options = [word for param in given if isinstance(param, click.Option) for word in (param.opts[0], "x")]
            # Arguments have no names on the command line, so the last one is the one that is missing.
            arguments = ["x"] * len([param for param in required if isinstance(param, click.Argument)])
            done = command(*words, *options, *arguments[isinstance(missing, click.Argument) :])
            assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
            assert f"Missing {missing.param_type_name}" in done.stderr
            asked.add((*words, missing.name))
    assert {("keys", "add", "tenant"), ("generate", "prompt")} <= asked


def test_a_pool_too_small_is_one_line(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lab.testbed.ports import free_port
    from lab.testbed.tiny_model import save_model

    model = str(save_model(tmp_path / "tiny"))
    monkeypatch.setenv("PILLION_CACHE", str(tmp_path / "cache"))
    # On torch no kernel is compiled for this one line, and a model that is ready needs no process of its own.
    make_ready(PrepareFlags(model=model, cpu_kernels="torch"), lambda line: None)
    flags = ("--cpu-kernels", "torch", "--kv-pool-bytes", "256KiB", "--grpc-port", str(free_port()), "--http-port", "0")
    done = pillion("serve", model, *flags, PILLION_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 2
    assert "lower --max-model-len" in done.stderr.strip().splitlines()[-1]
    assert "kvnode" not in done.stderr


def test_a_model_that_cannot_be_served_is_one_line_with_flag_and_file(tmp_path: pathlib.Path, command: Run) -> None:
    """It has no tokenizer, an unknown architecture, or lacks a layer."""
    from safetensors.torch import load_file, save_file

    from lab.testbed.tiny_model import save_model

    for name in ("bare", "strange", "short"):
        save_model(tmp_path / name)
    for file in (tmp_path / "bare").glob("tokenizer*"):
        file.unlink()
    config = tmp_path / "strange" / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"lama"'))
    weights = load_file(tmp_path / "short" / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if ".layers.1." not in name}
    save_file(kept, tmp_path / "short" / "model.safetensors")
    cases = {
        "bare": f"{tmp_path}/bare has no tokenizer: put its files there, one of tokenizer.json, tokenizer.model",
        "strange": f"{config}: architecture 'lama' is not supported; near it are llama",
        "short": f"{tmp_path}/short lacks model.layers.1.input_layernorm.weight",
    }
    for name, complaint in cases.items():
        done = command("prepare", str(tmp_path / name), "--dtype", "float32")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert done.stderr.startswith(f"pillion: --model: {complaint}")


@pytest.mark.parametrize(
    ("argument", "flag", "model"), [(None, "", "demo"), (None, "b", "b"), ("a", "", "a"), ("a", "from env", "a")]
)
def test_the_model_is_an_argument_a_flag_or_the_demo(argument: str | None, flag: str, model: str) -> None:
    assert with_model(ServeFlags, {"model_argument": argument, "model": flag}).model == model


def test_servers_need_the_server_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    component_process.require_server_packages()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else name)
    with pytest.raises(ConfigError, match=r"servers need torch: pip install 'pillion\[server\]'") as caught:
        component_process.require_server_packages()
    assert "\n" not in caught.value.message


def test_component_exit_statuses_after_failures_and_signals(tmp_path: pathlib.Path) -> None:
    """A component's exit status: 0 after SIGTERM, 1 if it failed by itself, 2 if its configuration is invalid."""
    script = """
import asyncio, sys
from pillion.supervisor import component_process
from pillion.config import KVNodeFlags
from pillion.errors import ConfigError
from pillion.observability.metrics import Meters
class FakeComponent:
    address = "here"
    meters = Meters()
    async def stop(self, grace_s=2.0): print("stopped", flush=True)
    async def wait_failed(self):
        if sys.argv[1] == "fails": return "the node went away"
        await asyncio.Event().wait()
async def start(flags):
    if sys.argv[1] == "refuses": raise ConfigError("no")
    print("up", flush=True)
    return FakeComponent()
import types
sys.modules["fake"] = types.SimpleNamespace(start=start)
component_process.ROLES["kvnode"] = ("fake", "start")
sys.argv[1:2] = [sys.argv[1]]
from pillion.cli.app import main
mode = sys.argv[1]
main(["kvnode"])
"""

    def start(mode: str) -> AbstractContextManager[subprocess.Popen[str]]:
        pipe = subprocess.PIPE
        return started([sys.executable, "-c", script, mode], stdout=pipe, stderr=pipe, text=True, cwd=ROOT)

    with start("fails") as failing:
        out, err = failing.communicate(timeout=WITHIN_S)
    assert (failing.returncode, out) == (1, "up\nstopped\n")
    assert "kvnode-0 stops: the node went away" in err
    with start("refuses") as refusing:
        out, err = refusing.communicate(timeout=WITHIN_S)
    assert (refusing.returncode, err) == (2, "pillion: no\n")
    with start("lives") as living:
        assert living.stdout is not None
        assert living.stdout.readline() == "up\n"
        living.terminate()
        out, _ = living.communicate(timeout=WITHIN_S)
    assert (living.returncode, out) == (0, "stopped\n")


def test_commands_get_child_statuses_even_if_sigchld_was_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    """Children inherit ignored signals: `pillion serve` did not get the status of a child."""
    known = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit):
            main(["version"])
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
        assert subprocess.run([sys.executable, "-S", "-c", "raise SystemExit(3)"], check=False).returncode == 3
    finally:
        signal.signal(signal.SIGCHLD, known)
    assert VERSION in capsys.readouterr().out


WRITE_DESCRIPTORS = "open({path!r}, 'w').write(' '.join(os.readlink(f'/proc/self/fd/{{n}}') for n in range(3)))"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_closed_standard_descriptors_are_opened_on_dev_null(tmp_path: pathlib.Path) -> None:
    """The caller may have closed its standard descriptors; children have them anyway."""
    own, child = (str(tmp_path / name) for name in ("own", "child"))
    code = f"""
import contextlib, os, subprocess, sys
from pillion.cli.app import main
with contextlib.suppress(SystemExit):
    main(["version"])
{WRITE_DESCRIPTORS.format(path=own)}
subprocess.run([sys.executable, "-S", "-c", {"import os; " + WRITE_DESCRIPTORS.format(path=child)!r}], check=True)
"""
    shell = 'exec "$0" -c "$1" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", shell, sys.executable, code], check=False, timeout=WITHIN_S).returncode == 0
    assert pathlib.Path(own).read_text() == pathlib.Path(child).read_text() == " ".join([os.devnull] * 3)


def test_sampling_options_are_the_fields_of_the_client() -> None:
    argv = [
        *("--max-tokens", "9", "--min-tokens", "2", "--temperature", "0", "--top-p", "0.5", "--top-k", "-1"),
        *("--min-p", "0.1", "--repetition-penalty", "1.1", "--presence-penalty", "-1", "--frequency-penalty", "0.25"),
        *("--logit-bias", "5=-2.5", "--logit-bias", "7=1", "--seed", "-3", "--stop", "a", "--stop", "b"),
        *("--stop-token-id", "4", "--stop-token-id", "6", "--ignore-eos"),
        *("--logprobs", "0", "--priority", "-5", "--n", "2", "--best-of", "3"),
    ]
    with cli.commands["generate"].make_context("generate", ["Once", *argv]) as ctx:
        sampling = {name: value for name, value in ctx.params.items() if name not in ("prompt", "target")}
    assert explicit_options(sampling) == {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": -1.0,
        "frequency_penalty": 0.25,
        "logit_bias": {5: -2.5, 7: 1.0},
        "seed": -3,
        "stop": ("a", "b"),
        "stop_token_ids": (4, 6),
        "ignore_eos": True,
        "logprobs": 0,
        "priority": -5,
        "n": 2,
        "best_of": 3,
    }
    fields = {name for name in explicit_options(sampling) if name != "priority"}
    assert fields <= set(SamplingParams.__dataclass_fields__)
    with cli.commands["chat"].make_context("chat", []) as ctx:
        assert (
            explicit_options(
                {name: value for name, value in ctx.params.items() if name not in ("system", "history", "target")}
            )
            == {}
        )


def test_several_answers_are_shown_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    end = FinishReason.LENGTH
    show_each(
        [
            Delta("r", "blue", index=1),
            Delta("r", "re", index=0),
            Delta("r", " sky", finish_reason=end, index=1),
            Delta("r", "d", finish_reason=end, index=0, logprobs=(TokenLogprob(3, -0.5),)),
            Delta("r", "", finish_reason=end, index=2),
        ]
    )
    assert capsys.readouterr().out == (
        "--- answer 1 ---\nred\n   token   logprob\n       3    -0.500\n"
        "--- answer 2 ---\nblue sky\n--- answer 3 ---\n\n"
    )


def test_log_probabilities_follow_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    asked = TokenLogprob(12345, -0.25, (12345, 8), (-0.25, -10.5))
    assert show([Delta("r", "one "), Delta("r", "two", logprobs=(asked, TokenLogprob(7, -1.0)))]) == "one two"
    assert capsys.readouterr().out == (
        "one two\n   token   logprob\n   12345    -0.250   | 12345 -0.250  8 -10.500\n       7    -1.000\n"
    )
    show([Delta("r", "x")])
    assert capsys.readouterr().out == "x\n"


def test_status_as_a_table() -> None:
    from rich.console import Console

    node = ComponentStatus(
        component_id="kvnode-0",
        role="kvnode",
        total_blocks=100,
        free_blocks=75,
        leased_blocks=5,
        committed_blocks=20,
        heartbeat_age_ms=12,
    )
    worker = ComponentStatus(
        component_id="decode-0",
        role="decode",
        model="m",
        node_id="kvnode-0",
        block_size_tokens=16,
        kernels="cpu/x",
        tensor_parallel_size=2,
        adapters=("0",),
    )
    status = ClusterStatus(
        version="1",
        components=(node, worker),
        active_requests=2,
        prompt_tokens=200,
        cached_tokens=50,
        completion_tokens=9,
        index_available=False,
    )
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(status_table(status))
    text = console.export_text()
    assert "…" not in text
    assert all(name in text for name in ("running", "waiting", "heartbeat", "12 ms ago", worker.component_id))
    lines = list(component_lines(status))
    assert f"{worker.component_id}: m, cpu/x, 2 ranks, at kvnode-0" in lines
    assert "kvnode-0: 25.0% of 100 blocks = 1,600 tokens (20 cached, 5 leased)" in lines
    assert pool_use(worker, 16) == ""
    assert pool_use(node, 0) == "25.0% of 100 blocks (20 cached, 5 leased)"
    assert summary(status).startswith("2 active, 200 prompt tokens (25% found in the cache), 9 generated")
    assert "Redis is not responding" in summary(status)
    model = ModelInfo("m", 4096, "", weights="awq, 4 bits in groups of 128")
    assert model_line(model, status) == "m: up to 4,096 tokens; weights: awq, 4 bits in groups of 128"
    french, dutch = (ModelInfo(name, 4096, "", parent="m", adapter=digest) for name, digest in (("f", "0"), ("d", "1")))
    assert model_line(french, status) == f"f: adapter of m, ready on {worker.component_id}"
    assert model_line(dutch, status) == "d: adapter of m, ready on no worker"


def test_a_component_command_is_made_of_its_flags() -> None:
    assert component_command.__doc__
    assert {"attach_socket", "kv_pool_bytes"} <= {p.name for p in cli.commands["kvnode"].params}
    assert "model_argument" not in {p.name for p in cli.commands["kvnode"].params}


def every_command(command: click.Command) -> Iterator[click.Command]:
    yield from chain(*map(every_command, command.commands.values())) if isinstance(command, click.Group) else [command]


def test_every_command_rejects_unknown_variables() -> None:
    """Including those of rooms, which are created apart from their group."""
    assert [command.name for command in every_command(cli) if not isinstance(command, FlagCommand)] == []


def test_temporary_folders_are_short_enough_for_sockets() -> None:
    from pillion.supervisor.runtime_dir import MAX_SOCKET_PATH_BYTES, RuntimeDir

    runtime = RuntimeDir.create()
    try:
        assert len(str(runtime.path / "prefill-63.sock")) <= MAX_SOCKET_PATH_BYTES
        assert runtime.path.parent in {pathlib.Path(p) for p in (tempfile.gettempdir(), "/tmp")} | {
            pathlib.Path(os.environ.get("XDG_RUNTIME_DIR", "/tmp"))
        }
    finally:
        runtime.remove()
