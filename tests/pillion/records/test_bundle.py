"""A bundle is read as it was written; a changed one is rejected; without the key it is unverified."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import pytest
from click.testing import CliRunner

from pillion.cli.explain_command import explain
from pillion.errors import ConfigError
from pillion.gateway.recorder.record_folder import make_key, write
from pillion.gateway.recorder.record_store import key_at, read_named
from pillion.records import bundle as bundles
from pillion.records.bundle import (
    KEY_FILE,
    Bundle,
    BundleAnswer,
    BundleModel,
    BundleRequest,
    StoryEvent,
    TokenTimes,
    encode,
    hidden,
    read,
)
from pillion.types import ChatMessage, SamplingParams, StructuredOutputs, Timings, Tool, ToolOptions, Usage

KEY = b"a key of the deployment"
NAME = "0123456789abcdef01234567"


def bundle_of(**fields: Any) -> Bundle:
    """Return a bundle with something in every kind of field."""
    sampling = SamplingParams(
        temperature=0.5,
        seed=-(2**63),
        n=2,
        stop=("\n\n",),
        logit_bias={42: -5.0},
        structured_outputs=StructuredOutputs(regex="[a-z]+"),
    )
    request = BundleRequest(
        operation="chat",
        label="req-" + NAME,
        prompt_tokens=3,
        sampling=sampling,
        token_ids=(1, 2, 3),
        messages=(ChatMessage(role="user", content="Où?"),),
        tools=ToolOptions(tools=(Tool(name="find"),)),
        bad_words=((4, 5),),
    )
    answer = BundleAnswer(tokens=1, token_ids=(7,), logprobs=(-0.1,), times=TokenTimes(first_ms=1.5, last_ms=1.5))
    known: dict[str, Any] = {
        "id": NAME,
        "created_unix_ms": 1_700_000_000_000,
        "reason": "slow",
        "tenant": "a",
        "content": "full",
        "version": "1",
        "model": BundleModel(name="toy", fingerprint="ab"),
        "request": request,
        "answers": (answer,),
        "story": (StoryEvent(at_ms=0.0, what="arrived"), StoryEvent(at_ms=1.5, what="tokens", worker="d")),
        "usage": Usage(3, 0, 1),
        "timings": Timings(total_ms=1.5),
    }
    return Bundle(**known | fields)


def test_a_bundle_round_trips(tmp_path: pathlib.Path) -> None:
    whole = bundle_of()
    write(tmp_path, whole.id, encode(whole, KEY))
    (path,) = tmp_path.iterdir()
    assert (path.name, path.stat().st_mode & 0o077) == (f"{NAME}.json", 0)
    for key, verified in ((KEY, True), (None, False)):
        found, trusted = read(path, key)
        assert trusted is verified
        assert bundle_of(mac=found.mac) == found


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda raw: raw.replace(b'"slow"', b'"asked"'), "its HMAC is wrong"),
        (lambda raw: raw.replace(b"-0.1", b"-0.2"), "its HMAC is wrong"),
        (lambda raw: raw.replace(b'"mac"', b'"more":1,"mac"'), "its HMAC is wrong"),
        (lambda raw: raw[: raw.index(b',"mac"')] + b"}", "its HMAC is wrong"),
        (lambda raw: raw.replace(b'"format":1', b'"format":2'), "not a bundle of format 1, but 2"),
        (lambda raw: raw[:-1], "is not a bundle"),
        (lambda raw: b"[" * 100_000, "is not a bundle"),
        (lambda raw: b"\xff\xfe", "is not a bundle"),
    ],
)
def test_invalid_and_modified_bundles_are_rejected(change: Any, complaint: str, tmp_path: pathlib.Path) -> None:
    raw, path = encode(bundle_of(), KEY), tmp_path / "it.json"
    path.write_bytes(raw)
    assert read(path, KEY)[1]
    with pytest.raises(ConfigError, match="its HMAC is wrong"):
        read(path, KEY + b"!")
    path.write_bytes(change(raw))
    with pytest.raises(ConfigError, match=complaint):
        read(path, KEY)


def test_signed_data_that_is_not_a_bundle_is_rejected(tmp_path: pathlib.Path) -> None:
    fields = json.loads(encode(bundle_of(), KEY))
    fields["reason"] = "whatever"
    (tmp_path / "it.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=r"is not a bundle.*reason"):
        read(tmp_path / "it.json", None)
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "nowhere", None)


def test_the_size_of_a_bundle_is_limited(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = encode(bundle_of(), KEY)
    write(tmp_path, NAME, raw)
    monkeypatch.setattr(bundles, "MAX_BUNDLE_BYTES", len(raw) - 1)
    with pytest.raises(ConfigError, match="at most"):
        encode(bundle_of(), KEY)
    with pytest.raises(ConfigError, match="but larger than"):
        read(tmp_path / f"{NAME}.json", KEY)


def test_an_hmac_identifies_one_value_of_one_field() -> None:
    assert hidden(KEY, "token_ids", (1, 2)) == hidden(KEY, "token_ids", (1, 2))
    others = [hidden(KEY, "token_ids", (12,)), hidden(KEY, "answer", (1, 2)), hidden(b"another", "token_ids", (1, 2))]
    assert hidden(KEY, "token_ids", (1, 2)) not in others


def test_gateways_of_one_folder_make_one_key(tmp_path: pathlib.Path) -> None:
    key = make_key(tmp_path)
    assert make_key(tmp_path) == key == key_at(str(tmp_path), "")
    assert [path.name for path in tmp_path.iterdir()] == [KEY_FILE]
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o077 == 0
    (tmp_path / "short").write_text(" secret \n")
    with pytest.raises(ConfigError, match="16 to"):
        key_at(str(tmp_path), str(tmp_path / "short"))
    assert key_at(str(tmp_path / "elsewhere"), "") is None


def test_a_bundle_is_found_by_its_id_its_path_and_its_requests_label(tmp_path: pathlib.Path) -> None:
    other = "f" * 24
    for name, label, age_s in ((NAME, "mine", 50), (other, "mine", 0), ("a" * 24, f"req-{'b' * 24}", 100)):
        raw = json.loads(encode(bundle_of(id=name), KEY))
        raw["request"]["label"] = label
        write(tmp_path, name, json.dumps(raw, separators=(",", ":")).encode())
        os.utime(tmp_path / f"{name}.json", (1e9 - age_s, 1e9 - age_s))
    folder, file = str(tmp_path), str(tmp_path / f"{NAME}.json")
    for name, path, found in ((NAME, folder, NAME), ("mine", folder, other), (file, "", NAME), (file, folder, NAME)):
        assert read_named(name, path, "")[0].id == found
    assert read_named(f"chatcmpl-{'b' * 24}", folder, "")[0].id == "a" * 24
    with pytest.raises(ConfigError, match="has no bundle of request"):
        read_named("nobody", folder, "")


def test_explain_prints_text_or_json(tmp_path: pathlib.Path) -> None:
    key = make_key(tmp_path)
    write(tmp_path, NAME, encode(bundle_of(), key))
    run = CliRunner().invoke
    shown = run(explain, [NAME, "--record-path", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith(f"req-{NAME} of tenant a, toy: slow\n")
    assert "The first token came after 1.5 ms, the last after 1.5 ms." in shown.output
    told = json.loads(run(explain, [str(tmp_path / f"{NAME}.json"), "--json"]).output)
    assert (told["id"], told["verified"]) == (NAME, True)
    (tmp_path / KEY_FILE).rename(tmp_path / "moved")
    assert "unverified" in run(explain, [NAME, "--record-path", str(tmp_path)]).output
    (tmp_path / "moved").write_text("another key of a deployment")
    refused = run(explain, [NAME, "--record-path", str(tmp_path), "--record-key-file", str(tmp_path / "moved")])
    assert isinstance(refused.exception, ConfigError)
