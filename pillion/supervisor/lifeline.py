"""Ties a child to its supervisor: when the supervisor dies, for whatever reason, the child dies too.

On Linux the kernel kills the child (PR_SET_PDEATHSIG, kept across execve); elsewhere the child polls its parent's
process id. On Linux a supervisor can also adopt children whose parent has ended. As a program (``python -m
pillion.supervisor.lifeline PARENT_PID COMMAND ...``) this module ties a command that cannot do so, such as Redis.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

PARENT_PID_VARIABLE = "PILLION_PARENT_PID"
PARENT_POLL_MS = 500
# From <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# True if the kernel can kill a process when its parent dies.
KERNEL_TIES = sys.platform.startswith("linux")


def parent_pid() -> int:
    """Return the supervisor's process id, 0 if there is none."""
    text = os.environ.get(PARENT_PID_VARIABLE, "")
    return int(text) if text.isdigit() else 0


def tie_to_parent(pid: int | None = None) -> None:
    """Make this process die with its parent ``pid`` (default: the supervisor). Does nothing without a supervisor."""
    pid = parent_pid() if pid is None else pid
    if not pid:
        return
    if KERNEL_TIES:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before prctl; then no signal comes.
    if os.getppid() != pid:
        os._exit(1)


def adopt_orphans() -> bool:
    """Make this process a child subreaper: it becomes the parent of each descendant whose parent ends. Returns False if
    the system lacks this or pidfds, with which adopted processes are watched."""
    if not KERNEL_TIES:
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return not ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run_tied(pid: int, command: list[str]) -> int:
    """Run ``command`` so that it ends with ``pid``, this process's parent. Does not return on Linux."""
    tie_to_parent(pid)
    if KERNEL_TIES:
        os.execvp(command[0], command)  # noqa: S606
    return watch(pid, command)


def watch(pid: int, command: list[str]) -> int:
    """Run ``command`` as a child, pass SIGTERM on to it, and kill it when the parent ``pid`` is gone. Works on every
    system."""
    child = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    while child.poll() is None:
        if os.getppid() != pid:
            child.kill()
        time.sleep(PARENT_POLL_MS / 1000)
    return child.returncode


if __name__ == "__main__":
    sys.exit(run_tied(int(sys.argv[1]), sys.argv[2:]))
