"""Exit statuses of replay and canary: no error is mistaken for a difference, or for a verdict."""

from __future__ import annotations

import pathlib

import pytest

from lab.testbed.ports import free_port
from pillion.cli.app import main
from pillion.gateway.recorder.record_folder import write
from pillion.records.bundle import encode
from tests.pillion.records.test_bundle import bundle_of


def status_of(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_errors_have_a_status_of_their_own(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in (("full", "full"), ("hashed", "hash")):
        (tmp_path / name).mkdir()
        bundle = bundle_of(content=content)
        write(tmp_path / name, bundle.id, encode(bundle, b"k" * 32))
    nobody = f"127.0.0.1:{free_port()}"
    full, hashed = (str(tmp_path / name / f"{bundle.id}.json") for name in ("full", "hashed"))
    for words, told in (
        (("replay", str(tmp_path / "none.json")), "by its id needs --record-path"),
        (("explain", "req-4f1c0ddc8e2b60aa91d5f3c7"), "by its id needs --record-path"),
        (("replay", hashed), "--record-content full"),
        (("replay", full, "--target", nobody), "does a gateway listen"),
        (("canary",), "--record-path"),
        (("canary", "--record-path", str(tmp_path), "--rule", "x=1"), "--rule"),
        (("canary", "--record-path", str(tmp_path), "--target", nobody), "does a gateway listen"),
    ):
        assert status_of(*words) == 2, words
        out, err = capsys.readouterr()
        assert told in err, words
        assert out == "" or words[0] == "replay", words
