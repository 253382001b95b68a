"""A figure of a worker's load is one line, and everything that shows it is derived from that line."""

from __future__ import annotations

import subprocess
import sys

from tests.test_structure import ROOT

# Each line stands in WorkerLoad, and then nowhere else; what follows runs in a process whose registry.py has both.
NEW = "    heat: Count = 0\n    wear: Annotated[Count, _LASTING, _shown(names.QUEUED_TOKENS)] = 0\n"
WHAT_FOLLOWS = """
import pathlib, sys, types
import pillion.wire
text = pathlib.Path("pillion/wire/registry.py").read_text()
before = "    running_requests: Annotated["
assert text.count(before) == 1
module = types.ModuleType("pillion.wire.registry")
sys.modules[module.__name__] = pillion.wire.registry = module
exec(compile(text.replace(before, NEW + before), "registry.py", "exec"), module.__dict__)

import msgspec
from pillion.engine.worker.worker_telemetry import load_readings
from pillion.observability import metric_catalog as names
from pillion.types import ClusterStatus
from pillion.wire.public import status_from_pb, status_to_pb
from pillion.wire.registry import ComponentRecord, WorkerLoad
from tests.support.planner_components import snapshot

load = WorkerLoad(heat=7, wear=3, queued_tokens=5)
record = ComponentRecord(component_id="d", role="decode", address="x", **msgspec.structs.asdict(load))
read = ComponentRecord.from_json(record.to_json())
assert read == record
assert ComponentRecord.from_json(record.to_json().replace('"heat":7', '"heat":-7')).heat == 0
assert snapshot(components=(read,)).components[0].heat == 7
assert (read.outdated().heat, read.outdated().wear) == (0, 3)
found = list(load_readings(load, 1))
assert (names.LOAD, ("heat",), 7) in found and (names.QUEUED_TOKENS, (), 3) in found
status = ClusterStatus(version="", components=(read.status(),), active_requests=0, prompt_tokens=0, cached_tokens=0,
                       completion_tokens=0, index_available=True)
told = status_from_pb(status_to_pb(status)).components[0]
assert told == read.status() and told.figures["heat"] == 7 and told.queued_tokens == 5
"""


def test_adding_a_load_figure_needs_one_line() -> None:
    script = f"NEW = {NEW!r}\n{WHAT_FOLLOWS}"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
