"""Sets what the process table shows for a forked component: its own command line, and whether it is only a standby.

    shown as a standby ("standby: python -m pillion decode ...") --serves--> "python -m pillion decode ..."

A fork has the command line of the process that forked it, but people and programs look for the component's own.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

STANDBY_VARIABLE = "PILLION_AWAITS_TURN"
WAITING_NAME = "pillion-standby"
WAITING_TITLE = "standby:"
_NAME = Path("/proc/self/comm")


def find_title() -> None:
    """Locate the memory of the command line that the process table shows, for this process and its forks. Must run
    before the first change of the environment, by whose address setproctitle finds that memory."""
    # Imported here because offline use imports this package without the servers' dependencies.
    from setproctitle import getproctitle, setthreadtitle

    name = program_name()
    getproctitle()
    setthreadtitle(name)


def show_title(*, waits: bool) -> None:
    """Show ``sys.orig_argv`` in the process table, after WAITING_TITLE if ``waits``. The program's name does not
    change."""
    from setproctitle import setproctitle, setthreadtitle

    name, title = program_name(), " ".join(sys.orig_argv)
    setproctitle(f"{WAITING_TITLE} {title}" if waits else title)
    setthreadtitle(name)


def program_name() -> str:
    """Return the name of this process's program. setproctitle would overwrite it with the title."""
    return _NAME.read_text(encoding="utf-8").strip() if _NAME.exists() else Path(sys.executable).name


def name_program(name: str) -> None:
    """Set the name of this process's program, where the process table has one: on Linux only."""
    with contextlib.suppress(OSError):
        _NAME.write_text(name, encoding="utf-8")
