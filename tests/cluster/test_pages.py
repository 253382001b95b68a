"""Every snippet and command of README and docs, run as it stands in a copy of the clone against `make serve`.

What a page says about places is put right for this run: the usual ports become those of the cluster here. A command of
NOT_RUN is parsed alone: its program, its flags and their values have to exist.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator

import click
import pytest
import yaml
from google.protobuf import json_format

from lab.fleets.__main__ import simulate
from lab.testbed.certs import make_certs
from lab.testbed.cluster import READY_TIMEOUT_S
from lab.testbed.conditions import WITHIN_S, wait_for
from lab.testbed.ports import free_port, free_ports
from pillion.cli.app import cli
from pillion.config import ModelFlags
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.models.config_parser import load_config
from pillion.v1 import gateway_pb2
from tests.support.adapters import write_adapter
from tests.support.pages import (
    LANGUAGES,
    PAGES,
    PROGRAMS,
    ROOT,
    PageBlock,
    blocks,
    check_command,
    commands,
    flags_of,
    inline_code,
    make_targets,
    outside_blocks,
    words_of,
)
from tests.support.processes import started

pytestmark = [pytest.mark.cluster, pytest.mark.model]

# Blocks of docs/agents.md need third-party programs; tests/cluster/test_agents.py runs them.
OWN_PAGES = [page for page in PAGES if page != "docs/agents.md"]
# Prefixes of commands that are only parsed, with the reason.
NOT_RUN = {
    "git clone": "the clone is there",
    "make": "it sets up an environment or loads the machine for minutes; the cluster here was started by `make serve`",
    "pytest": "all tests run anyway",
    "docker": "there is no engine where tests run; tests/deploy/test_compose.py runs the file's services",
    "pip install": "the environment is there, and no index is asked",
    "helm": "there is no Kubernetes; tests/deploy/test_kubernetes.py renders the chart",
    "grpcurl": "it is no package; its request is parsed here",
    "pillion serve": "a cluster of its own; the one here was started so",
    "pillion gateway": "a component of several hosts",
    "pillion decode": "a component of several hosts",
    "pillion keeper": "it goes on until it is killed; tests/kvstore/pool_survival/test_recovery.py runs it",
    "pillion kvnode": "a component of several hosts",
    "pillion events": "it goes on until it is killed; tests/kvstore/events/test_followers.py runs it",
    "pillion explain": "the cluster here records nothing; tests/pillion/records explains bundles",
    "pillion replay": "the cluster here records nothing; tests/pillion/records replays bundles",
    "pillion drill": "it kills components of the cluster; tests/cluster/test_drill.py runs it",
    "pillion canary": "it goes on until it has decided; tests/pillion/records/test_canary.py runs it",
    "pillion prepare FOLDER": "the folder is the reader's own; tests/engine/checkpoints prepares all formats",
    "python -m lab.fleets": "a minute of computing; tests/lab/fleets/test_command.py runs it small",
    "pillion bench sweep": "minutes of load; tests/pillion/loadgen/test_end_to_end.py runs it small",
}
ELSEWHERE = "example.org"
# `pillion bench` as in the pages takes minutes; the last of repeated options wins.
SMALL_LOAD = "--requests 3 --rate 50 --no-progress"
SMALL = {"random": "--input-len 8 --output-len 4", "chats": "--turns 2 --think-s 0 --system-len 8 --output-len 4"}
# Flags of third-party programs in the pages.
FOREIGN_FLAGS = {
    *("--scale", "--build-arg", "--build", "--profile"),  # docker
    *("--namespace", "--create-namespace", "--set", "--timeout"),  # helm, kubectl
    *("--strict", "--all", "--few", "--time-s", "--csv"),  # mypy; lab.gpu_builds; lab.benchmarks.gpu, traces
    *("--careful", "--mutate"),  # lab.simulator
    *("--worker-start-s", "--ignored-fields", "--eviction-policy"),  # Pillion 0.2.0
    "--chat-template-path",  # vLLM's example of a chat
}
# Required output of a page's code.
PRINTED = {
    "docs/sdk.md": ("tokens of the prompt were in the cache", "2 answers", "sampling.top_p"),
    "docs/structured.md": ("FinishReason.STOP City(country='", "\nred="),
    "docs/lora.md": ("sql changes SmolLM2-135M-Instruct", "sql fp_"),
    "docs/tools.md": ("weather {'city': ",),
    "docs/batches.md": ('"custom_id":"a-1"', '"status_code":200'),
}
CHAT_INPUT = "What is the capital of France?\n"


@dataclasses.dataclass(frozen=True, slots=True)
class ServedClone:
    """A copy of the clone in which `make serve` runs. ``lines``: what the start printed."""

    folder: pathlib.Path
    grpc: int
    http: int
    metrics: int
    lines: tuple[str, ...]

    def here(self, text: str) -> str:
        """Return a page's text with the ports of this cluster."""
        last = self.metrics + 3
        places = {":9500-9503": f":{self.metrics}-{last}", ":9464": f":{self.metrics}", ":50051": f":{self.grpc}"}
        for usual, ours in (places | {":8000": f":{self.http}"}).items():
            text = text.replace(f"127.0.0.1{usual}", f"127.0.0.1{ours}")
        return text

    def environ(self) -> dict[str, str]:
        """Return the environment of a developer in this clone."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PILLION_")}
        path = f"{self.folder}/.venv/bin:{os.environ['PATH']}"
        kept |= {"PATH": path, "PYTHONPATH": str(self.folder), "PILLION_TARGET": f"127.0.0.1:{self.grpc}"}
        return kept | {"TQDM_DISABLE": "1"}

    def run(self, command: list[str], *, asked: str = "") -> str:
        """Return the stdout of a command in this clone, which must succeed."""
        done = subprocess.run(
            command, cwd=self.folder, env=self.environ(), input=asked, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout


def copy_of_the_clone(folder: pathlib.Path) -> None:
    """Copy the repository's files; return the clone with these tests' environment."""
    shutil.copytree(ROOT, folder, symlinks=True, ignore=shutil.ignore_patterns(".*", "tests", "build"))
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, words in {"python": "", "pillion": "-m pillion"}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
        (programs / name).chmod(0o755)
    for stamp in (".made", ".torch", ".server"):
        (folder / ".venv" / stamp).touch()


@pytest.fixture(scope="module")
def clone() -> Iterator[ServedClone]:
    with tempfile.TemporaryDirectory(prefix="pil-") as short:
        folder = pathlib.Path(short) / "pillion"
        copy_of_the_clone(folder)
        cluster = ServedClone(folder, free_port(), free_port(), free_ports(4), ())
        flags = f"--grpc-port {cluster.grpc} --http-port {cluster.http} --metrics-port {cluster.metrics}"
        log = folder / "serve.txt"
        environ = cluster.environ() | {"TMPDIR": short}
        demo = prepare(ModelFlags(model="demo"))
        write_adapter(load_config(demo.folder), pathlib.Path(short) / "adapters" / "sql-v1")
        adapters = f"--enable-lora --allow-runtime-lora-updating --lora-path {short}/adapters"
        # The context limits the answers, which normally end by themselves.
        more = f"--max-model-len 768 --batch-path {short}/batches {adapters}"
        words = ["make", "-s", "serve", f"ARGS={flags} {more}"]
        with (
            log.open("wb") as out,
            started(words, cwd=folder, env=environ, stdout=out, stderr=out, start_new_session=True) as process,
        ):

            def ready() -> bool:
                assert process.poll() is None, log.read_text()
                return " chat --target " in log.read_text()

            try:
                wait_for("the last line of the start", ready, READY_TIMEOUT_S)
                yield dataclasses.replace(cluster, lines=tuple(log.read_text().splitlines()))
            finally:
                # As Ctrl-C in a terminal: to make and to the cluster.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGINT)
                process.wait(WITHIN_S)


@pytest.mark.long
def test_startup_prints_five_lines_and_two_working_commands(clone: ServedClone) -> None:
    *facts, curl, chat = clone.lines
    facts = [line for line in facts if not line.startswith("pillion ")]
    assert [line.partition("|")[0].strip() for line in facts] == ["model", "type", "kernels", "memory", "ready"]
    assert "SmolLM2-135M-Instruct (or demo)" in facts[0]
    assert f"gRPC 127.0.0.1:{clone.grpc}, HTTP http://127.0.0.1:{clone.http}" in facts[-1]
    if shutil.which("curl"):
        answer = json.loads(clone.run(["bash", "-c", curl.replace("curl ", "curl --silent --fail-with-body ")]))
        assert answer["choices"][0]["text"]
    assert "Paris" in clone.run(["bash", "-c", f"{chat} --temperature 0"], asked=CHAT_INPUT)


PAGES_OF_CODE = [page for page in OWN_PAGES if any(b.language == "python" for b in blocks(page))]


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES_OF_CODE)
def test_documented_python_code_runs(clone: ServedClone, page: str) -> None:
    code = "\n".join(block.text for block in blocks(page) if block.language == "python")
    if "client.pem" in code and not (clone.folder / "client.pem").exists():
        if shutil.which("openssl") is None:
            pytest.skip("needs openssl for the certificates of the page's clients")
        made = make_certs(clone.folder / "made certificates")
        for path in made:
            shutil.copy(path, clone.folder / path.name)
    printed = clone.run([sys.executable, "-c", clone.here(code)])
    if page == "README.md":
        assert printed.count("Paris") >= 2, printed
    for text in PRINTED.get(page, ()):
        assert text in printed


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in OWN_PAGES if any(b.language == "sh" for b in blocks(page))])
def test_documented_commands_run(clone: ServedClone, page: str) -> None:
    for block in blocks(page):
        for command in commands(block) if block.language == "sh" else ():
            words = words_of(command)
            if any(" ".join(words).startswith(known) for known in NOT_RUN) or (
                ELSEWHERE in command and "lab.testbed.certs" not in command
            ):
                continue
            if words[:2] == ["pillion", "bench"]:
                target = [] if "--target" in words else ["--target", f"127.0.0.1:{clone.grpc}"]
                small = SMALL["chats" if "chats" in words else "random"]
                command = shlex.join([*words, *target, *SMALL_LOAD.split(), *small.split()])
            if words[0] == "curl" and not shutil.which("curl"):
                continue
            clone.run(["bash", "-c", clone.here(command)], asked=CHAT_INPUT)


def all_commands() -> Iterator[tuple[PageBlock, str]]:
    for page in OWN_PAGES:
        for block in blocks(page):
            for command in commands(block) if block.language == "sh" else ():
                yield block, command


@pytest.mark.parametrize("command", [pytest.param(c, id=f"{b.page}: {c[:50]}") for b, c in all_commands()])
def test_documented_commands_and_flags_exist(command: str, tmp_path: pathlib.Path) -> None:
    words = words_of(re.sub(r"\$\w+|<[^>]*>", "x", command))
    if words:
        assert words[0] in PROGRAMS or words[0] == "cd", f"an unknown program: {command}"
        check_command(words)
    if words and words[0] == "grpcurl":
        body, method = words[words.index("-d") + 1], words[-1].rpartition("/")
        service = gateway_pb2.DESCRIPTOR.services_by_name["Gateway"]
        assert method[0] == service.full_name
        json_format.Parse(body, getattr(gateway_pb2, service.methods_by_name[method[2]].input_type.name)())


def test_an_unknown_documented_command_is_detected() -> None:
    for wrong in ("pillion serv", "pillion serve --no-such-flag", "pillion bench --rate x", "pillion chat --top-k x"):
        with pytest.raises(click.UsageError):
            check_command(words_of(wrong))
    for wrong in ("make nothing", "make serve MODELS=x", "pip install 'pillion[no]'"):
        with pytest.raises(AssertionError):
            check_command(words_of(wrong))


@pytest.mark.parametrize("page", OWN_PAGES)
def test_documented_commands_are_in_checked_blocks(page: str) -> None:
    programs = "|".join(map(re.escape, PROGRAMS))
    hidden = re.findall(rf"^ {{4,}}(?:[A-Z_]+=\S+ )*(?:{programs}) .*$", outside_blocks(page), re.MULTILINE)
    assert hidden == [], "commands stand in ```sh"
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{page}:{block.line}: ```{block.language}"
        if block.language == "json":
            json.loads(block.text)
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "yaml":
            list(yaml.safe_load_all(block.text))
        elif block.language == "text":
            assert not re.search(rf"^(?:{programs}|import|from) ", block.text, re.MULTILINE), f"{page}:{block.line}"


@pytest.mark.parametrize("page", PAGES)
def test_inline_code_names_existing_commands_and_flags(page: str) -> None:
    known = flags_of(cli) | flags_of(simulate) | FOREIGN_FLAGS
    for code in inline_code(page):
        if code.startswith("pillion "):
            words = re.sub(r"[\[\]]", "", code).split()
            assert words[1] in cli.commands, code
            named = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert named <= flags_of(cli.commands[words[1]]), code
        elif code.startswith("make "):
            assert {word for word in shlex.split(code)[1:] if "=" not in word} <= make_targets(), code
        elif code.startswith("--"):
            assert re.split(r"[ =\[,]", code)[0] in known or code.endswith("*"), f"{page}: {code}"
