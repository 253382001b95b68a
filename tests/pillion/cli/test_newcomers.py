"""What somebody sees in the first ten minutes, where something is not as it should be."""

from __future__ import annotations

import errno
import io
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from pillion.cli import app, events_command
from pillion.errors import ConfigError
from pillion.supervisor.demo import DemoAnswer, table_of
from pillion.types import ClusterStatus, ComponentStatus, Timings, Usage


def nodes(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """A gateway that knows KV nodes of these names."""
    known = tuple(ComponentStatus(component_id=name, role="kvnode", address=f"unix:/run/{name}.sock") for name in names)
    status = ClusterStatus(
        version="1",
        components=(ComponentStatus(component_id="decode-0", role="decode"), *known),
        active_requests=0,
        prompt_tokens=0,
        cached_tokens=0,
        completion_tokens=0,
        index_available=True,
    )

    class KnownCluster:
        def __init__(self, **reach: Any) -> None:
            assert reach == {"target": "here"}

        def __enter__(self) -> KnownCluster:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def status(self) -> ClusterStatus:
            return status

    monkeypatch.setattr(events_command, "Client", KnownCluster)


def test_the_only_node_of_a_cluster_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes(monkeypatch, "kvnode-0")
    assert events_command.find_node("", {"target": "here"}) == "unix:/run/kvnode-0.sock"
    assert events_command.find_node("kvnode-0", {"target": "here"}) == "unix:/run/kvnode-0.sock"
    with pytest.raises(ConfigError, match=r"'b' is no KV node .*: kvnode-0 \(unix:/run/kvnode-0.sock\)"):
        events_command.find_node("b", {"target": "here"})
    nodes(monkeypatch, "a", "b")
    with pytest.raises(ConfigError, match=r"name the KV node to follow; .*: a \(unix:/run/a.sock\), b "):
        events_command.find_node("", {"target": "here"})
    assert events_command.find_node("b", {"target": "here"}) == "unix:/run/b.sock"


def test_the_demonstration_s_table_fits_into_80_columns() -> None:
    timings = Timings(cached_tokens=1024, prefilled_tokens=4096, prefill_chunks=16, tail_tokens=511)
    answer = DemoAnswer("second turn", usage=Usage(5631, 1024, 100), timings=timings)
    answer.token_times_s = [answer.began_s + 12.5, answer.began_s + 13.75, answer.began_s + 15.0]
    console = Console(width=80, file=io.StringIO())
    console.print(table_of([answer] * 3))
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in written
    assert all(text in written for text in ("second turn", "4096 (16)", "511", "12500", "1250.0"))


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


def test_a_command_whose_packages_are_missing_is_one_line() -> None:
    # As where only the SDK's own dependencies are installed.
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
    for arguments in (["simulate", "--trace", "x"], ["serve", "demo"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        assert "pip install 'pillion[server]'" in done.stderr
