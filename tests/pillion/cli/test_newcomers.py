"""A new user's first ten minutes when something is wrong."""

from __future__ import annotations

import errno
import pathlib
import subprocess
import sys

import pytest

from pillion.cli import app


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_is_one_line(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(number, "No space left on device", "/here/file")

    monkeypatch.setattr(app.cli, "main", full)
    with pytest.raises(SystemExit) as ended:
        app.main([])
    assert ended.value.code == 1
    assert capsys.readouterr().err == "pillion: No space left on device: /here/file\n"


def run_as_a_client(*arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    """Run ``pillion`` with only the SDK's own dependencies installed."""
    code = "\n".join(
        (
            "import sys, importlib.abc",
            "class Missing(importlib.abc.MetaPathFinder):",
            "    def find_spec(self, name, path=None, target=None):",
            "        if name.partition('.')[0] in ('numpy', 'msgspec', 'torch', 'redis', 'llguidance'):",
            "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)",
            "sys.meta_path.insert(0, Missing())",
            "from pillion.cli.app import main",
            "main(sys.argv[1:])",
        )
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], input=typed, capture_output=True, text=True, check=False
    )


def test_keys_are_made_where_no_server_is_installed(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "keys.toml"
    added = run_as_a_client("keys", "add", str(file), "--tenant", "acme")
    assert added.returncode == 0, added.stderr
    hashed = run_as_a_client("keys", "hash", typed=added.stdout)
    assert hashed.returncode == 0, hashed.stderr
    assert hashed.stdout.strip() in file.read_text()


def test_missing_packages_are_a_one_line_error() -> None:
    done = run_as_a_client("serve", "demo")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "pip install 'pillion[server]'" in done.stderr
