"""Repeated runs of the command ``pillion`` in one process beside the tests, to avoid its start-up time."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.processes import started

ROOT = pathlib.Path(__file__).resolve().parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]
_PROGRAM = """
import contextlib, io, json, sys
from pillion.cli.app import main
for line in sys.stdin:
    words, asked = json.loads(line)
    out, err, code, mine = io.StringIO(), io.StringIO(), 0, sys.stdin
    sys.stdin = io.StringIO(asked)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words)
        except SystemExit as end:
            code = end.code or 0
    sys.stdin = mine
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""


@contextlib.contextmanager
def pillion_commands(**environ: str) -> Iterator[Run]:
    """Return a function that runs the command with the given words; ``asked`` is its stdin.

    Libraries read their variables once, so all calls share one environment, without variables of Pillion or the hub.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PILLION_", "HF_"))}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    options = {**pipes, "cwd": ROOT, "env": clean | {"COLUMNS": "200"} | environ}
    with started([sys.executable, "-c", _PROGRAM], **options) as process:

        def run(*words: str, asked: str = "") -> subprocess.CompletedProcess[str]:
            assert process.stdin is not None
            assert process.stdout is not None
            print(json.dumps([words, asked]), file=process.stdin, flush=True)
            said = process.stdout.readline()
            assert said, f"the process that runs pillion {' '.join(words)} ended with status {process.wait()}"
            return subprocess.CompletedProcess(words, *json.loads(said))

        yield run
