"""What the process table shows of a forked component: its own command line, and whether it only stands by.

    shown as a standby ("standby: python -m pillion decode ...") --it serves--> "python -m pillion decode ..."

A fork has the command line of the process that it was forked from. People and programs look for components by theirs.
"""

from __future__ import annotations

import sys
from pathlib import Path

# What a process is called that waits for its turn.
WAITING_NAME = "pillion-standby"
# What stands before the command line of a fork that stands by, whether it waits already or not.
WAITING_TITLE = "standby:"


def find_title() -> None:
    """Finds the memory that the process table shows, for this process and those that are forked from it. That is found
    by the environment, which moves with its first change: a process that was not looked at before shows what it did."""
    # Not at the top: offline use imports this package without what servers need.
    from setproctitle import getproctitle, setthreadtitle

    name = _program()
    getproctitle()
    setthreadtitle(name)


def show_title(*, waits: bool) -> None:
    """Shows ``sys.orig_argv``, and whether the process stands by. The name of its program stays."""
    from setproctitle import setproctitle, setthreadtitle

    name, title = _program(), " ".join(sys.orig_argv)
    setproctitle(f"{WAITING_TITLE} {title}" if waits else title)
    setthreadtitle(name)


def _program() -> str:
    """The name of this process's program, over which setproctitle writes the title. Only Linux forks components."""
    comm = Path("/proc/self/comm")
    return comm.read_text(encoding="utf-8").strip() if comm.exists() else Path(sys.executable).name
