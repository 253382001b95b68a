"""What somebody sees in the first ten minutes, where something is not as it should be."""

from __future__ import annotations

import errno
import io
import pathlib
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
from rich.console import Console

from pillion.cli import app
from pillion.supervisor.demo import LONG_PROMPT_CHARACTERS, POLICIES, DemoAnswer, converse, table_of
from pillion.types import Timings, Usage
from pillion.v1 import gateway_pb2
from pillion.wire.public import PLAN_HEADER


def test_the_demonstration_s_table_fits_into_80_columns() -> None:
    tokens = {"cached_tokens": 1024, "prefilled_tokens": 4096, "prefill_chunks": 16, "tail_tokens": 511}
    timings = Timings(**tokens, prefill_ms=12489.6, decode_queue_ms=100.25)
    answer = DemoAnswer("disaggregated again", usage=Usage(5631, 1024, 100), timings=timings)
    answer.token_times_s = [answer.began_s + 12.5, answer.began_s + 13.75, answer.began_s + 15.0]
    console = Console(width=80, file=io.StringIO())
    console.print(table_of([answer] * 3))
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in written
    figures = ("disaggregated", "5631", "1024", "4096 (16)", "511", "12490", "100.2", "12500", "1250.0")
    assert all(text in written for text in figures)


class AskedStub:
    """Is asked in place of a gateway, and notes what comes."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, str]] = []

    async def Generate(  # noqa: N802
        self,
        request: gateway_pb2.GenerateRequest,
        *,
        timeout: float,  # noqa: ASYNC109  (gRPC's own name)
        metadata: list[tuple[str, str]],
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        plan = dict(metadata).get(PLAN_HEADER, "")
        self.asked.append((plan, len(request.messages[-1].content), request.cache_salt))
        yield gateway_pb2.GenerateResponse(text="Paris", token_ids=[1])


async def test_the_demonstration_asks_one_long_prompt_cold_by_each_policy_and_once_more() -> None:
    stub = AskedStub()
    answers = await converse(stub, (*POLICIES, "auto"))
    assert [answer.title for answer in answers] == [
        *("first turn", "second turn"),
        *("colocated", "disaggregated", "auto", "auto again"),
    ]
    assert [(plan, salt) for plan, _, salt in stub.asked] == [
        *[("", "")] * 2,
        ("policy=colocated", "colocated"),
        ("policy=disaggregated", "disaggregated"),
        *[("policy=auto", "auto")] * 2,
    ]
    assert all(answer.text == "Paris" and len(answer.token_times_s) == 1 for answer in answers)
    long = {size for _, size, salt in stub.asked if salt}
    assert len(long) == 1
    assert long.pop() > LONG_PROMPT_CHARACTERS


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
    """Runs ``pillion`` as where only the SDK's own dependencies are installed."""
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


def test_a_command_whose_packages_are_missing_is_one_line() -> None:
    done = run_as_a_client("serve", "demo")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "pip install 'pillion[server]'" in done.stderr
