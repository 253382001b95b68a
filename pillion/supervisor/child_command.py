"""How a supervisor starts a component: the command line and the environment of the child."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from pillion.cli.flags import env_name, to_argv, without_flags
from pillion.supervisor.lifeline import PARENT_PID_VARIABLE


def component_argv(role: str, flags: Any) -> tuple[str, ...]:
    """The command line of one component, with every flag in it."""
    # The Redis URL may hold a password, and everybody can read a command line: it goes by environment.
    arguments = to_argv(flags, leave_out=("redis_url",))
    # The name comes first: people search `ps` for it.
    arguments.sort(key=lambda word: not word.startswith(("--component-id=", "--node-id=")))
    return (sys.executable, "-m", "pillion", role, *arguments)


def child_environ(environ: Mapping[str, str], redis_url: str) -> dict[str, str]:
    """The environment of this supervisor's components: no flags but the Redis URL, nothing that phones home."""
    return without_flags(environ) | {
        env_name("redis_url"): redis_url,
        PARENT_PID_VARIABLE: str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        # Components start programs, but never use gRPC in a forked child; gRPC's fork handlers only log that they were
        # skipped.
        "GRPC_ENABLE_FORK_SUPPORT": "0",
    }
