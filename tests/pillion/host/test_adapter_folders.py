"""Room for copies of adapters: what is removed first, what stays, and drafts of dead writers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pillion.host.adapter_folders import MIN_FREE_BYTES, make_room, temporary_folder


def copy(adapters: Path, name: str, *, used: bool) -> Path:
    folder = adapters / name
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(bytes(100))
    if not used:
        os.utime(folder, (0, 0))
    return folder


def names(adapters: Path) -> set[str]:
    return {folder.name for folder in adapters.iterdir()}


def test_unused_copies_are_evicted_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def usage(path: object) -> Any:
        return disk._replace(free=MIN_FREE_BYTES + 250 - 100 * len(names(tmp_path)))

    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", usage)
    copy(tmp_path, "used", used=True)
    copy(tmp_path, "unused", used=False)
    make_room(tmp_path, 50)
    assert names(tmp_path) == {"used", "unused"}
    make_room(tmp_path, 100)
    assert names(tmp_path) == {"used"}
    with pytest.raises(OSError, match="bytes free"):
        make_room(tmp_path, 151)
    assert names(tmp_path) == {"used"}


def test_unused_copies_are_evicted_at_the_limit(tmp_path: Path) -> None:
    copy(tmp_path, "used", used=True)
    copy(tmp_path, "unused", used=False)
    make_room(tmp_path, 50, max_bytes=150)
    assert names(tmp_path) == {"used"}
    with pytest.raises(OSError, match="at most 150 are allowed"):
        make_room(tmp_path, 51, max_bytes=150)


def test_a_draft_is_removed_once_its_writer_died(tmp_path: Path) -> None:
    code = f"""
import os
from pathlib import Path
from pillion.host.adapter_folders import temporary_folder
with temporary_folder(Path({str(tmp_path)!r}), 1) as draft:
    os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    (lost,) = tmp_path.iterdir()
    with temporary_folder(tmp_path, 1) as draft:
        assert names(tmp_path) == {lost.name, draft.name}, "a new draft may be about to be locked"
        for old in (lost, draft):
            os.utime(old, (0, 0))
        make_room(tmp_path, 1)
        assert names(tmp_path) == {draft.name}
    assert names(tmp_path) == set()
