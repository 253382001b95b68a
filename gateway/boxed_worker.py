"""Program of :mod:`pillion.gateway.boxed_process`'s process, run as a file and never imported.

Nothing inside a Python process can stop a thread that computes ``10 ** 10 ** 9``. So the operating system does: a timer
whose signal ends this process, and a limit on its memory. The process reads and writes JSON messages on its standard
streams, each after its length in four bytes, big-endian. The first message is the setup, which names the handler's
file; jobs follow. This program needs only the standard library; the handler may need more.
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
        sys.exit(0)
    return sys.stdin.buffer.read(int.from_bytes(head, "big"))


def _write(message: dict[str, Any]) -> None:
    try:
        # Without escapes, which take longer to decode on the gateway's event loop.
        data = json.dumps(message, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        data = json.dumps({"broken": "its output is not valid Unicode"}).encode()
    sys.stdout.buffer.write(len(data).to_bytes(4, "big") + data)
    sys.stdout.buffer.flush()


def _load_handler(setup: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    """Load the handler's file; return its function from a job to its answer."""
    spec = importlib.util.spec_from_file_location("boxed_handler", setup["handler"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    handler: Callable[[Any], dict[str, Any]] = module.opened(setup["own"])
    return handler


def main() -> None:
    """Serve jobs until standard input ends."""
    # Ctrl-C is for the gateway; this process ends with its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setup = json.loads(_read())
    with contextlib.suppress(ValueError, OSError):
        # macOS refuses this limit; there, only the timer bounds the memory.
        resource.setrlimit(resource.RLIMIT_AS, (setup["memory_bytes"], setup["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    handle = _load_handler(setup)
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
