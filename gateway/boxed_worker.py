"""The process of :mod:`pillion.gateway.boxed_process`: run as a file, never imported.

Nothing inside a Python process can stop a thread that computes ``10 ** 10 ** 9``. So the box is the operating system's:
a timer whose signal ends this process, and a limit on its memory. It speaks over its standard streams: a four-byte
length, then JSON; first the set-up, which names the file that makes answers, then jobs. It needs the standard library
only; what that file needs is its own matter.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any


def _read() -> bytes:
    head = sys.stdin.buffer.read(4)
    if len(head) < 4:
        # The gateway is gone.
        sys.exit(0)
    return sys.stdin.buffer.read(int.from_bytes(head, "big"))


def _write(message: dict[str, Any]) -> None:
    try:
        # As it is, without escapes: the gateway reads it on its event loop.
        data = json.dumps(message, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        data = json.dumps({"broken": "it wrote what is not valid Unicode"}).encode()
    sys.stdout.buffer.write(len(data).to_bytes(4, "big") + data)
    sys.stdout.buffer.flush()


def _handler(setup: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    spec = importlib.util.spec_from_file_location("boxed_handler", setup["handler"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    handler: Callable[[Any], dict[str, Any]] = module.opened(setup["own"])
    return handler


def main() -> None:
    """Serves until standard input ends."""
    # Ctrl-C is for the gateway; this process ends with its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setup = json.loads(_read())
    with contextlib.suppress(ValueError, OSError):
        # macOS knows this limit and refuses to set it; the timer bounds how much a job can fill there.
        resource.setrlimit(resource.RLIMIT_AS, (setup["memory_bytes"], setup["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    handle = _handler(setup)
    while True:
        job = _read()
        # The signal's default action ends the process in the kernel, whatever code runs.
        signal.setitimer(signal.ITIMER_PROF, setup["cpu_s"])
        try:
            answer = handle(json.loads(job))
        except Exception as error:  # noqa: BLE001  (a template that does not compile, a number that is too long)
            answer = {"broken": f"{type(error).__name__}: {error}"[:1000]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answer)


if __name__ == "__main__":
    main()
