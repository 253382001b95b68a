"""Bundles in a real Redis: shared by gateways, found by commands; a lost Redis costs records alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from lab.testbed.conditions import until
from lab.testbed.redis import running_redis
from lab.testbed.redis_kinds import running_cluster
from pillion import StructuredOutputs
from pillion.cli.explain_command import explain
from pillion.cli.replay_commands import canary
from pillion.errors import ConfigError, Unavailable
from pillion.gateway.recorder import record_redis
from pillion.gateway.recorder.record_store import REDIS, RecordStore, open_records, read_named
from pillion.gateway.ui.ui_api import newest_stories
from pillion.kvstore.index import redis_keys as keys
from tests.gateway.recorder.test_recorder import PROMPT, SCRIPT, ask, counts, ids_of, script_of
from tests.support.fake_components import running_fake_cluster

IDS = [f"{number:024x}" for number in range(6)]


@contextlib.contextmanager
def place(kind: str) -> Iterator[str]:
    """Return the URL of a Redis of this kind."""
    if kind == "cluster":
        with running_cluster() as servers:
            yield "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)
    else:
        with running_redis() as server:
            yield server.url


def there(records: RecordStore) -> list[int]:
    return [IDS.index(bundle_id) for bundle_id, _ in records.listed()]


@pytest.mark.parametrize("kind", ["server", "cluster"])
def test_bundles_are_kept_within_bounds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two bundles removed and three listed per call, so that several calls are needed.
    monkeypatch.setattr(record_redis, "BUNDLES_AT_ONCE", 2)
    monkeypatch.setattr(record_redis, "RECORDS_DEADLINE_MS", 60_000)
    with place(kind) as url, open_records(REDIS, url, 3000, 1000.0) as records:
        assert there(records) == []
        for bundle_id in IDS[:4]:
            records.store(bundle_id, b"x" * 1000)
        assert sorted(there(records)) == [1, 2, 3]
        assert [records.read(bundle_id) for bundle_id in IDS[:2]] == [b"", b"x" * 1000]
        records.store(IDS[4], b"y" * 3000)
        assert (list(records.listed()), records.read(IDS[4])) == ([(IDS[4], 3000)], b"y" * 3000)
        with pytest.raises(ConfigError, match="allowed in Redis"):
            records.store(IDS[5], b"x" * 3001)
        with open_records(REDIS, url, 3000, -1.0) as hasty:
            hasty.store(IDS[5], b"x")
        assert IDS[4] not in [bundle_id for bundle_id, _ in records.listed()]


async def test_a_gateway_keeps_its_bundles_in_redis(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("a key of the deployment")
    flags: dict[str, Any] = {"record_key_file": str(key_file), "record_share": 1.0, "record_content": "full"}
    async with running_fake_cluster(SCRIPT, record_path=REDIS, **flags) as fakes:
        url = fakes.redis.url
        monkeypatch.setenv("PILLION_REDIS_URL", url)
        monkeypatch.setenv("PILLION_RECORD_PATH", REDIS)
        await ask(fakes)
        deltas = await ask(fakes, structured_outputs=StructuredOutputs(regex="[A-Z].*"), max_tokens=3)
        await until("two bundles", lambda: counts(fakes) == {"share": 2})
        label = deltas[0].request_id
        bundle, verified = await asyncio.to_thread(read_named, label, REDIS, str(key_file), url)
        assert (bundle.request.label, verified, bundle.content) == (label, True, "full")
        told = await asyncio.to_thread(CliRunner().invoke, explain, [bundle.id, "--json"])
        assert not json.loads(told.output)["verified"]
        stories = json.loads(await asyncio.to_thread(newest_stories, REDIS, str(key_file), url))["stories"]
        assert [story["verified"] for story in stories] == [True, True]
        more = ("--existing", "--requests", "2", "--rule", "differs=1", "--tokens-per-second", "1000000")
        words = ["--target", fakes.gateway.grpc_address, *more]
        ended = await asyncio.to_thread(CliRunner().invoke, canary, words, standalone_mode=False)
        assert ended.return_value == 0, ended.output
        fakes.redis.command("DEL", *keys.RECORDS)
        await ask(fakes)
        await until("a bundle", lambda: fakes.redis.command("ZCARD", keys.RECORDS[1]) == 1)
        fakes.redis.kill()
        assert ids_of(await ask(fakes, PROMPT), 0) == script_of(SCRIPT)
        await until("a count", lambda: counts(fakes).get("unwritten") == 1)
        with pytest.raises(Unavailable):
            await asyncio.to_thread(read_named, bundle.id, REDIS, "", url)
