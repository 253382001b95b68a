"""Other defaults of the product's keyword-only parameters, for processes of tests and benchmarks.

Limits that no flag sets are such parameters (`pillion/settings/node_limits.py`, `gateway/gateway_limits.py`). A test
passes others to the objects that it makes itself; to the processes that it starts it passes them by a variable, which
the hooks of :mod:`lab.testbed.faults` and forks (:mod:`lab.testbed.nested_forks`) read.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from operator import attrgetter
from types import ModuleType
from typing import Any

# Its name must not begin as those of the product's settings do.
DEFAULTS_VARIABLE = "TESTBED_DEFAULTS"
# "MODULE:FUNCTION" of the functions whose defaults are changed.
NODE = "pillion.settings.node_limits:NodeLimits.__init__"
GATEWAY = "pillion.gateway.gateway_limits:GatewayLimits.__init__"
DECODE = "pillion.decode_service.assemble:start_decode"
CLUSTER = "pillion.supervisor.local_cluster:LocalCluster.__init__"

# Parameters and values by function.
Defaults = Mapping[str, Mapping[str, Any]]


def defaults_environment(*defaults: Defaults) -> dict[str, str]:
    """Return the variable that sets these defaults; later ones win. Programs also need the path of the hooks."""
    merged: dict[str, dict[str, Any]] = {}
    for one in defaults:
        for function, values in one.items():
            merged.setdefault(function, {}).update(values)
    return {DEFAULTS_VARIABLE: json.dumps(merged)} if merged else {}


def change_module(module: ModuleType) -> None:
    """Set the defaults of a module's functions."""
    for function, values in _wanted().items():
        name, _, path = function.partition(":")
        if name == module.__name__:
            known = attrgetter(path)(module).__kwdefaults__
            assert known.keys() >= values.keys(), f"{function} has no {values.keys() - known.keys()}"
            known.update(values)


def modules_to_change() -> set[str]:
    """Return the modules with other defaults; those that are imported already are changed now."""
    names = {function.partition(":")[0] for function in _wanted()}
    imported = names & sys.modules.keys()
    for name in imported:
        change_module(sys.modules[name])
    return names - imported


def _wanted() -> dict[str, dict[str, Any]]:
    wanted: dict[str, dict[str, Any]] = json.loads(os.environ.get(DEFAULTS_VARIABLE) or "{}")
    return wanted
