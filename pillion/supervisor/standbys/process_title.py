"""Sets what the process table shows of a forked component: its own command line, and whether it only stands by.

    shown as a standby ("standby: python -m pillion decode ...") --it serves--> "python -m pillion decode ..."

A fork has the command line of the process that it was forked from, but people and programs look for a component by the
component's own.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

# This variable is set for a process that stands by until its turn comes.
STANDBY_VARIABLE = "PILLION_AWAITS_TURN"
# A process that waits for its turn has this name.
WAITING_NAME = "pillion-standby"
# These words stand before the command line of a fork that stands by, whether it waits already or not.
WAITING_TITLE = "standby:"
_NAME = Path("/proc/self/comm")


def find_title() -> None:
    """Find the memory that the process table shows, for this process and those that are forked from it. It is found by
    the environment, which moves when it first changes: a process that changes its environment before this call goes on
    showing its old command line."""
    # The import stands here because offline use imports this package without what servers need.
    from setproctitle import getproctitle, setthreadtitle

    name = program_name()
    getproctitle()
    setthreadtitle(name)


def show_title(*, waits: bool) -> None:
    """Let the process table show ``sys.orig_argv``, and whether the process stands by. The name of its program stays
    as it is."""
    from setproctitle import setproctitle, setthreadtitle

    name, title = program_name(), " ".join(sys.orig_argv)
    setproctitle(f"{WAITING_TITLE} {title}" if waits else title)
    setthreadtitle(name)


def program_name() -> str:
    """Return the name of this process's program, over which setproctitle writes the title."""
    return _NAME.read_text(encoding="utf-8").strip() if _NAME.exists() else Path(sys.executable).name


def name_program(name: str) -> None:
    """Return this process's program another name, where the process table has such names: on Linux alone."""
    with contextlib.suppress(OSError):
        _NAME.write_text(name, encoding="utf-8")
