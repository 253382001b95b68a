"""Choice of the lines that a gateway runs; none is lost when it stops."""

from __future__ import annotations

import pathlib
from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec

from lab.testbed.conditions import loop_turns
from pillion.gateway.admission.tenants import Tenant
from pillion.gateway.batches.batch_folder import BatchFolder
from pillion.gateway.batches.batch_machine import BatchMachine
from pillion.gateway.batches.batch_records import BatchRecord
from pillion.gateway.batches.batch_runner import BatchRunner, RunningBatch
from pillion.observability.metrics import Meters

TENANTS = {"a": Tenant(name="a", weight=2), "b": Tenant(name="b"), "c": Tenant(name="c")}
RECORD = BatchRecord(
    id="batch_a", tenant="a", endpoint="/v1/completions", input_file_id="f", created_at=0, expires_at=2**40
)


def running(tenant: str) -> RunningBatch:
    record = msgspec.structs.replace(RECORD, tenant=tenant)
    claimed: Any = SimpleNamespace(record=record)
    return RunningBatch(claimed, BatchMachine(record, range(1, 101)))


def runner_of(path: pathlib.Path, *batches: RunningBatch) -> BatchRunner:
    folder = BatchFolder(path, max_bytes=10**6, file_bytes=10**6, keep_s=1)
    serve: Any = None
    found = BatchRunner(folder, serve, TENANTS.get, Meters(), 8)
    found._running.extend(batches)
    return found


async def test_lines_are_shared_by_tenant_weight(tmp_path: pathlib.Path) -> None:
    """Independent of the number of their batches."""
    runner = runner_of(tmp_path, running("a"), *(running("b") for _ in range(3)), running("gone"))
    picked = [runner._next() for _ in range(12)]
    counts = Counter(found[2].name for found in picked if found is not None)
    assert counts == {"a": 8, "b": 4}
    each = Counter(id(found[0]) for found in picked if found is not None and found[2].name == "b")
    assert sorted(each.values()) == [1, 1, 2]


async def test_a_line_cancelled_before_it_begins_is_returned(tmp_path: pathlib.Path) -> None:
    batch = running("a")
    runner = runner_of(tmp_path, batch)
    number = batch.machine.next_line(0.0)
    assert number is not None
    runner.start_line(batch, number, TENANTS["a"])
    (line,) = batch.lines
    line.cancel()
    await loop_turns(5)
    assert line.cancelled()
    assert not batch.machine.running
    assert not batch.lines
    assert batch.machine.queued == 100
    assert batch.machine.next_line(0.0) == number
