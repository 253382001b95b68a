"""The folder of batches: killed at any moment, each line has one result and files are whole."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import time
from typing import Any

import msgspec
import pytest

from pillion.errors import ConfigError, Conflict, InvalidRequest, NotFound, Overloaded
from pillion.gateway.batches import batch_folder
from pillion.gateway.batches.batch_claim import BatchClaim, claim
from pillion.gateway.batches.batch_folder import BatchFolder, FileTooLarge, FolderFull
from pillion.gateway.batches.batch_lines import InputCheck, JournalEntry, output_line, unserved_line
from pillion.gateway.batches.batch_machine import BatchMachine
from tests.support.batch_checks import check_batches

CHAT = "/v1/chat/completions"
DAY_S = 86400


class Killed(BaseException):
    """Simulated end of the process."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync: only processes are killed here, never the power."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda file: None)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> BatchFolder:
    return BatchFolder(tmp_path / "b", max_bytes=10**6, file_bytes=10**5, keep_s=2 * DAY_S)


def uploaded(folder: BatchFolder, content: bytes, tenant: str = "") -> str:
    with contextlib.closing(folder.upload(tenant, len(content))) as upload:
        upload.write(content)
        return upload.finish("in.jsonl", "batch").id


def inputs(count: int) -> bytes:
    lines = ({"custom_id": f"c{n}", "method": "POST", "url": CHAT, "body": {"n": n}} for n in range(count))
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def created(folder: BatchFolder, count: int = 3, tenant: str = "") -> str:
    return folder.create(tenant, uploaded(folder, inputs(count), tenant), CHAT, None).id


def begun(held: BatchClaim) -> BatchMachine:
    check = InputCheck(CHAT, 10**4)
    while held.check_input(check, 10**4):
        pass
    assert check.end() == ()
    machine = BatchMachine(held.record, list(check.spans), held.replay())
    machine.begin(time.time())
    return machine


def worked(folder: BatchFolder, name: str) -> None:
    """Run one batch as the runner does; every second line fails."""
    held = claim(folder, name)
    if held is None:
        return
    try:
        machine = begun(held)
        held.save(machine.record)
        while (number := machine.next_line(time.time())) is not None:
            line = held.line(number)
            answer = output_line(name, number, line.custom_id, 200, "r", bytes(line.body))
            held.append([JournalEntry(number, number % 2 == 0, answer)])
            machine.finished(number, number % 2 == 0)
            held.save(machine.record)
        machine.finalize(time.time())
        held.save(machine.record)
        machine.end(*held.write_outputs(iter(())), time.time())
        held.finish(machine.record)
    finally:
        # The OS does this for a killed process.
        held.close()


class Death:
    """Kills the process at the ``at``-th call that changes the folder, mid-write if that call writes."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int) -> None:
        self.calls, self._at = 0, at
        for place, name in ((os, "fsync"), (os, "fdatasync"), (os, "ftruncate"), (os, "write")):
            patch.setattr(place, name, self._dying(getattr(place, name)))
        for name in ("replace", "unlink"):
            patch.setattr(pathlib.Path, name, self._dying(getattr(pathlib.Path, name)))

    def _dying(self, original: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls >= self._at:
                if original.__name__ == "write" and self.calls == self._at:
                    original(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                raise Killed
            return original(*arguments, **named)

        return call


def test_a_batch_killed_at_any_moment_is_finished_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at, ended = 0, False
    while not ended:
        at += 1
        folder = BatchFolder(tmp_path / str(at), max_bytes=10**6, file_bytes=10**5, keep_s=2 * DAY_S)
        name = created(folder)
        for attempt in range(at % 3 + 1):
            with monkeypatch.context() as patch:
                death = Death(patch, max(1, at - attempt))
                with contextlib.suppress(Killed):
                    worked(folder, name)
                    ended = attempt == 0
            check_batches(folder)
        worked(folder, name)
        folder.sweep(time.time())
        check_batches(folder)
        assert not list(folder.path.glob("batches/*/journal"))
        batch = folder.batch("", name)
        assert (batch.status, batch.total, batch.completed, batch.failed) == ("completed", 3, 2, 1)
        for output, wanted in ((batch.output_file_id, [0, 2]), (batch.error_file_id, [1])):
            assert output is not None
            said = [json.loads(line) for line in folder.content(output).read_text().splitlines()]
            assert [(one["custom_id"], one["response"]["body"]) for one in said] == [
                (f"c{n}", {"n": n}) for n in wanted
            ]
    assert death.calls > 20


def test_a_file_killed_at_any_moment_is_whole_or_not_there(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in range(1, 20):
        folder = BatchFolder(tmp_path / str(at), max_bytes=10**6, file_bytes=10**5, keep_s=2 * DAY_S)
        with monkeypatch.context() as patch:
            death = Death(patch, at)
            with contextlib.suppress(Killed):
                uploaded(folder, b"content")
        check_batches(folder)
        assert [one.bytes for one in folder.files("")] in ([], [7])
        folder.sweep(time.time() + batch_folder.PART_AGE_S + 60)
        assert len(list((folder.path / "files").iterdir())) == 2 * len(folder.files(""))
        if death.calls < at:
            return
    raise AssertionError("it does not end")


def test_a_batch_has_one_owner_process(folder: BatchFolder) -> None:
    name = created(folder)
    held = claim(folder, name)
    assert held is not None
    assert claim(folder, name) is None
    held.close()
    held.close()
    again = claim(folder, name)
    assert again is not None
    again.close()
    worked(folder, name)
    assert claim(folder, name) is None


def test_a_tenant_sees_only_its_own_files(folder: BatchFolder) -> None:
    mine = created(folder, tenant="a")
    file_id = folder.files("a")[0].id
    for tenant in ("", "b"):
        assert folder.files(tenant) == folder.batches(tenant) == []
        for ask in (folder.batch, folder.cancel):
            with pytest.raises(NotFound):
                ask(tenant, mine)
        for ask in (folder.file, folder.open_file, folder.delete_file):
            with pytest.raises(NotFound):
                ask(tenant, file_id)
        with pytest.raises(InvalidRequest, match="input_file_id: there is no file"):
            folder.create(tenant, file_id, CHAT, None)
    assert [one.id for one in folder.batches("a")] == [mine]
    for name in ("../files", "file-" + "0" * 24, "", "batch_/..", "x" * 10_000):
        with pytest.raises(NotFound):
            folder.file("a", name)
        with pytest.raises(NotFound):
            folder.batch("a", name)


def test_an_input_is_kept_while_a_batch_reads_it(folder: BatchFolder) -> None:
    name = created(folder)
    file_id = folder.batch("", name).input_file_id
    with pytest.raises(Conflict, match=name):
        folder.delete_file("", file_id)
    folder.sweep(time.time() + 10 * DAY_S)
    assert folder.file("", file_id)
    worked(folder, name)
    with pytest.raises(Conflict, match="completed"):
        folder.cancel("", name)
    folder.delete_file("", file_id)
    with pytest.raises(NotFound):
        folder.file("", file_id)
    with pytest.raises(InvalidRequest, match="batch_output"):
        folder.create("", str(folder.batch("", name).output_file_id), CHAT, None)


def test_old_files_are_removed(folder: BatchFolder) -> None:
    name = created(folder)
    worked(folder, name)
    folder.sweep(time.time() + DAY_S)
    assert len(folder.files("")) == 3
    assert folder.batches("")
    folder.sweep(time.time() + 3 * DAY_S)
    assert folder.files("") == folder.batches("") == []
    assert folder.used_bytes() == 0
    assert not any((folder.path / "batches").iterdir())


def test_the_folder_is_bounded(folder: BatchFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileTooLarge, match="larger than"):
        folder.upload("", 2**22)
    upload = folder.upload("")
    with pytest.raises(FileTooLarge):
        upload.write(bytes(10**5 + 1))
    upload.close()
    with pytest.raises(InvalidRequest, match="it is empty"):
        uploaded(folder, b"")
    assert folder.used_bytes() == 0
    for _ in range(9):
        uploaded(folder, bytes(10**5))
    for size_bytes in (10**5, 0):
        # A file of unknown length may become as large as the limit.
        with pytest.raises(FolderFull, match="bytes"):
            folder.upload("", size_bytes)
    assert not folder.full()
    uploaded(folder, bytes(10**6 - folder.used_bytes()))
    assert folder.full()
    monkeypatch.setattr(batch_folder, "MAX_FILES", 3)
    monkeypatch.setattr(folder, "max_bytes", 10**9)
    with pytest.raises(FolderFull, match="3 files"):
        folder.upload("")
    monkeypatch.setattr(batch_folder, "MAX_OPEN_BATCHES", 1)
    file_id = folder.files("")[0].id
    folder.create("", file_id, CHAT, None)
    with pytest.raises(Overloaded, match="have not ended"):
        folder.create("", file_id, CHAT, None)
    monkeypatch.setattr(batch_folder, "MAX_BATCHES", 1)
    with pytest.raises(FolderFull, match="1 batches"):
        folder.create("", file_id, CHAT, None)


def test_concurrent_uploads_share_the_folder_limit(folder: BatchFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reservations count across gateways that share the folder, and are returned. A file of unknown length reserves the
    maximum."""
    monkeypatch.setattr(batch_folder, "TENANT_UPLOADS", 11)
    with contextlib.ExitStack() as stack:
        known = [stack.enter_context(contextlib.closing(folder.upload("", 10**5))) for _ in range(8)]
        unknown = [stack.enter_context(contextlib.closing(folder.upload(""))) for _ in range(2)]
        other = BatchFolder(folder.path, max_bytes=10**6, file_bytes=10**5, keep_s=2 * DAY_S)
        assert other.used_bytes() == 10**6
        for one in (folder, other):
            with pytest.raises(FolderFull, match="bytes"):
                one.upload("", 10)
        for upload in (*known, *unknown):
            upload.write(bytes(10**5))
    assert folder.used_bytes() == 0
    assert not folder.uploads


SHARES = {"max_bytes": 10**6, "file_bytes": 10**5, "keep_s": 2 * DAY_S, "tenant_percent": 25}


def test_no_tenant_fills_the_folder_for_others(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_folder, "MAX_FILES", 40)
    monkeypatch.setattr(batch_folder, "MAX_BATCHES", 20)
    folder = BatchFolder(tmp_path / "b", **SHARES)
    for _ in range(2):
        uploaded(folder, bytes(10**5), "red")
    with pytest.raises(FolderFull, match=r"this tenant already has 250000 bytes in .*, the share of a tenant .25 %"):
        uploaded(folder, bytes(10**5), "red")
    small = uploaded(folder, inputs(3), "green")
    for _ in range(9):
        uploaded(folder, b"{}", "green")
    with pytest.raises(FolderFull, match=r"already has 10 files in .*, the share of a tenant"):
        folder.upload("green")
    for _ in range(5):
        folder.create("green", small, CHAT, None)
    with pytest.raises(FolderFull, match=r"already has 5 batches in .*, the share"):
        folder.create("green", small, CHAT, None)
    for tenant in ("blue", ""):
        created(folder, tenant=tenant)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_full_disk_is_an_error_and_leaves_nothing(
    folder: BatchFolder, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    name = created(folder)
    held = claim(folder, name)
    assert held is not None
    begun(held)
    held.append([JournalEntry(1, False, b"{}")])

    def full(file: int, data: bytes, write: Any = os.write) -> int:
        """Write a few bytes, as a full disk does."""
        if len(data) > 4:
            return int(write(file, bytes(data)[:4]))
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(FolderFull, match=os.strerror(number)):
            held.append([JournalEntry(2, False, b'{"long": 1}')])
        with pytest.raises(FolderFull):
            uploaded(folder, b"content")
    held.close()
    again = claim(folder, name)
    assert again is not None
    assert again.record.id == name
    machine = begun(again)
    assert machine.record.completed == 1
    again.append([JournalEntry(2, False, b"{}")])
    assert again.replay() == [(1, False), (2, False)]
    again.close()
    check_batches(folder)


def test_unserved_lines_are_in_the_error_file(folder: BatchFolder) -> None:
    name = created(folder)
    held = claim(folder, name)
    assert held is not None
    begun(held)
    held.append([JournalEntry(2, False, b'{"n": 1}')])
    output, errors = held.write_outputs(unserved_line(name, n, f"c{n}", "x", "y") for n in (1, 3))
    held.close()
    assert output is not None
    assert errors is not None
    assert folder.content(output).read_bytes() == b'{"n": 1}\n'
    assert [json.loads(line)["custom_id"] for line in folder.content(errors).read_text().splitlines()] == ["c1", "c3"]


def test_a_folder_that_cannot_be_used_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--batch-path"):
        BatchFolder(tmp_path / "file", max_bytes=1, file_bytes=1, keep_s=1)


def test_damage_is_detected(folder: BatchFolder) -> None:
    name = created(folder)
    worked(folder, name)
    check_batches(folder)
    batch = folder.batch("", name)
    path = folder.batch_path(name) / "batch.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(batch, completed=1)))
    with pytest.raises(AssertionError, match="has 2 lines, not 1"):
        check_batches(folder)
    folder.content(str(batch.output_file_id)).write_bytes(b"")
    with pytest.raises(AssertionError, match="another size"):
        check_batches(folder)
