"""When a changed file is read again: never while it is written, however it was replaced, and until it worked."""

from __future__ import annotations

import logging
import os
import pathlib

import pytest

from lab.testbed.conditions import WITHIN_S, wait_for
from pillion.errors import ConfigError
from pillion.gateway.admission.api_keys import KeyFile, hash_of
from pillion.net.watched import Watched


@pytest.fixture(autouse=True)
def no_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file becomes stable because the machine stalls between two lines of a test."""
    monkeypatch.setattr("pillion.net.watched.AT_REST_S", WITHIN_S)


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    made = tmp_path / "file"
    made.write_text("one")
    # Some file systems give two changes within four milliseconds the same time.
    os.utime(made, (0, 0))
    return made


def test_a_changing_file_is_read_once_it_is_stable(path: pathlib.Path) -> None:
    watched = Watched([str(path)])
    assert watched.newer(path.read_text) is None
    with path.open("w") as file:
        for piece in ("two", " and", " more"):
            file.write(piece)
            file.flush()
            assert watched.newer(path.read_text) is None
    assert watched.newer(path.read_text) == "two and more"
    assert watched.newer(path.read_text) is None


def test_an_old_change_is_read_at_the_first_look(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched([str(path)])
    path.write_text("two")
    now = path.stat().st_ctime
    monkeypatch.setattr("pillion.net.watched.time.time", lambda: now + 3600.0)
    assert watched.newer(path.read_text) == "two"


def test_a_secret_swapped_by_a_folder_symlink_is_reread(tmp_path: pathlib.Path) -> None:
    """In a Kubernetes secret the file is a link into ..data, which is a link to the version's folder."""
    for number in ("1", "2"):
        (tmp_path / number).mkdir()
        (tmp_path / number / "keys").write_text(number)
    (tmp_path / "..data").symlink_to("1")
    (tmp_path / "keys").symlink_to("..data/keys")
    path = tmp_path / "keys"
    watched = Watched([str(path)])
    (tmp_path / "..data_tmp").symlink_to("2")
    os.replace(tmp_path / "..data_tmp", tmp_path / "..data")
    assert [watched.newer(path.read_text), watched.newer(path.read_text)] == [None, "2"]


def test_a_permission_change_counts_as_a_change(path: pathlib.Path) -> None:
    watched, before = Watched([str(path)]), path.stat().st_ctime_ns

    def changed() -> bool:
        path.chmod(0o640)
        return path.stat().st_ctime_ns > before

    wait_for("a later time of change", changed)
    watched.newer(path.read_text)
    assert watched.newer(path.read_text) == "one"


def test_files_that_change_while_they_are_read_are_read_again(path: pathlib.Path) -> None:
    watched = Watched([str(path)])

    def read() -> str:
        found = path.read_text()
        if found == "two":
            path.write_text("three")
        return found

    path.write_text("two")
    assert [watched.newer(read) for _ in range(4)] == [None, None, None, "three"]


def test_unreadable_files_are_retried_and_logged_once(path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """For example with too many open files: a removed key must not stay valid because of that."""
    watched, failing, reads = Watched([str(path)]), True, []

    def read() -> str:
        reads.append(failing)
        if failing:
            raise ConfigError("no file handle is free") from OSError()
        return path.read_text()

    path.write_text("two")
    with caplog.at_level(logging.WARNING):
        assert [watched.newer(read) for _ in range(4)] == [None] * 4
    assert len(reads) == 3
    assert len(caplog.records) == 1
    failing = False
    assert watched.newer(read) == "two"


def test_an_invalid_file_is_read_once(path: pathlib.Path) -> None:
    watched, reads = Watched([str(path)]), []

    def read() -> str:
        reads.append(1)
        raise ConfigError("nonsense")

    path.write_text("two")
    assert [watched.newer(read) for _ in range(5)] == [None] * 5
    assert len(reads) == 1


def test_a_half_written_keys_file_is_ignored(tmp_path: pathlib.Path) -> None:
    """Every prefix of it that ends with a line is a valid keys file too."""
    path = tmp_path / "keys.toml"
    lines = ["[tenant.acme]\n"]
    for letter in "abc":
        lines += ["[[key]]\n", 'tenant = "acme"\n', f'hash = "{hash_of(letter * 40)}"\n']
    path.write_text("".join(lines))
    file = KeyFile(str(path))
    with path.open("w") as out:
        for line in (*lines, "# and a comment\n"):
            out.write(line)
            out.flush()
            file.refresh()
            assert file.ring.tenant_of("Bearer " + "c" * 40).name == "acme"
    assert file.refresh()
