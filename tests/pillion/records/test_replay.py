"""Requests that real components recorded are replayed, with the same weights and with others, and a canary
distinguishes versions."""

from __future__ import annotations

import asyncio
import pathlib
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from lab.testbed.conditions import until
from lab.testbed.recorded_requests import KINDS, TEMPLATE, ask, bundles_in, bundles_of, recorded_model, replayed
from pillion import AsyncClient
from pillion.engine.backends import host_backend
from pillion.errors import ConfigError
from pillion.gateway.admission.api_keys import hash_of, new_key
from pillion.gateway.recorder.record_folder import RecordFolder, write
from pillion.records import bundle as bundles
from pillion.records.bundle import Bundle, BundleModel
from pillion.records.canary import CanaryTally, parse_rule
from pillion.records.canary_run import Canary, CanaryExit
from pillion.records.replay import model_of, sent_grammar
from pillion.types import ModelInfo
from tests.pillion.records.test_bundle import bundle_of
from tests.support.components import Components, running_components

pytestmark = pytest.mark.asyncio(loop_scope="module")
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def components(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Components]:
    model, adapter = recorded_model(tmp_path_factory.mktemp("recorded"))
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        records = pathlib.Path(name) / "records"
        edge = {"record_path": str(records), "record_content": "full", "record_share": 1.0, "chunk_size": 32}
        async with running_components(
            pathlib.Path(name),
            model={"model": str(model), "dtype": "float32", "max_model_len": 512, **LORA},
            gateway={**edge, "lora_modules": (f"red={adapter}",)},
        ) as running:
            await until("the gateway to know the worker's model", running.client.models)
            yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def recorded(components: Components, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Bundles of a request of each kind, in a folder to which nothing is added."""
    await asyncio.gather(*(ask(components.client, kind) for kind in KINDS))
    folder = tmp_path_factory.mktemp("bundles")
    for path in await bundles_of(components.folder / "records", len(KINDS)):
        shutil.copy(path, folder)
    shutil.copy(components.folder / "records" / bundles.KEY_FILE, folder)
    return folder


async def test_every_request_kind_replays_identically(components: Components, recorded: pathlib.Path) -> None:
    for path in bundles_in(recorded):
        status, lines = await replayed(path, components.gateway.grpc_address)
        assert (status, lines[-1].partition(":")[0]) == (0, "equal"), (path.read_text(), lines)
        assert lines[0].endswith(": verified")
    await components.proven()


async def test_a_replay_uses_token_ids_if_the_template_differs(components: Components, recorded: pathlib.Path) -> None:
    """A gateway with another template makes another prompt of the messages, and then gets the ids."""
    other = components.folder / "other.jinja"
    other.write_text("Be brief. " + TEMPLATE)
    notes = 0
    async with components.another_gateway_address(chat_template=str(other)) as address:
        for path in bundles_in(recorded):
            if bundles.read(path, None)[0].model.adapter:
                continue
            status, lines = await replayed(path, address)
            assert status == 0, lines
            notes += any("another prompt" in line for line in lines)
    assert notes == sum(kind in KINDS for kind in ("chat", "tools"))


async def test_another_plan_computes_the_same_tokens(components: Components, recorded: pathlib.Path) -> None:
    for path in bundles_in(recorded)[:3]:
        status, lines = await replayed(path, components.gateway.grpc_address, plan="policy=colocated")
        assert status == 0
        assert any(line.startswith("plan: colocated: ") for line in lines)
        then = bundles.read(path, None)[0].timings
        words = [f"({getattr(then, f'{name}_ms'):.0f} ms then)" for name in ("time_to_first_token", "total")]
        assert re.findall(r"\(\d+ ms then\)", lines[1]) == words


async def test_a_replay_computes_the_whole_prompt(components: Components, recorded: pathlib.Path) -> None:
    path, records = bundles_in(recorded)[0], components.folder / "records"
    for _ in range(2):
        assert (await replayed(path, components.gateway.grpc_address))[0] == 0
    label = f"replay-{path.stem}"

    def replays() -> list[Bundle]:
        found = [bundles.read(one, None)[0] for one in bundles_in(records)]
        return [one for one in found if one.request.label == label]

    await until("the replays' own bundles", lambda: len(replays()) >= 2)
    assert {one.usage.cached_tokens for one in replays()} == {0}
    # A replay asks for its own bundle, whatever share of requests the target records.
    assert {one.reason for one in replays()} == {"asked"}


async def test_unreplayable_bundles_are_reported(
    components: Components, recorded: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    path, target = bundles_in(recorded)[0], components.gateway.grpc_address
    shutil.copy(path, tmp_path)
    alone = tmp_path / path.name
    assert (await replayed(alone, target))[1][0].endswith("unverified, for there is no key of the deployment")
    key = bundles.read_key(recorded / bundles.KEY_FILE)
    bundle, _ = bundles.read(path, key)
    shutil.copy(recorded / bundles.KEY_FILE, tmp_path)
    fields = msgspec.json.decode(path.read_bytes())
    alone.write_bytes(msgspec.json.encode(fields | {"tenant": "other"}))
    with pytest.raises(ConfigError, match="HMAC is wrong"):
        await replayed(alone, target)
    for changes, words in (
        ({"content": "hash"}, "--record-content full"),
        ({"answers": ()}, "no answer"),
        ({"request": msgspec.structs.replace(bundle.request, operation="embeddings")}, "asked for a vector"),
        ({"model": msgspec.structs.replace(bundle.model, fingerprint="ab" * 32)}, "other weights"),
        ({"model": msgspec.structs.replace(bundle.model, asked="x", fingerprint="ab")}, "serves no model 'x'"),
    ):
        changed = msgspec.structs.replace(bundle, **changes)
        write(tmp_path, changed.id, bundles.encode(changed, key))
        with pytest.raises(ConfigError, match=words):
            await replayed(alone, target)


async def canary(
    recorded: pathlib.Path, target: str, rule: str = "", **more: Any
) -> tuple[int, CanaryTally, list[str]]:
    lines: list[str] = []
    tally = CanaryTally(parse_rule(rule), more.pop("wanted", len(KINDS)))
    run = Canary(
        listed=RecordFolder(recorded).listed,
        read=RecordFolder(recorded).read,
        key=bundles.read_key(recorded / bundles.KEY_FILE),
        reach={"target": target},
        tally=tally,
        say=lines.append,
        existing=True,
        tokens_per_s=1e6,
        **more,
    )
    return await run.run(), tally, lines


async def test_the_same_version_is_promoted(
    components: Components, recorded: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    target, page = components.gateway.grpc_address, tmp_path / "metrics"
    status, tally, lines = await canary(recorded, target, metrics_file=page, concurrency=2)
    assert (status, lines) == (CanaryExit.PROMOTE, ["promote"])
    assert tally.all.counts == {"equal": len(KINDS)}
    assert "pillion_canary_promote 1.0" in page.read_text()
    # Log probabilities were recorded with one kind, and are the same bit for bit.
    assert (tally.all.mean_distance, tally.all.compared_tokens > 0) == (0.0, True)
    status, _, lines = await canary(recorded, target, wanted=len(KINDS) + 1)
    assert (status, lines[-1].partition(":")[0]) == (CanaryExit.UNDECIDED, "undecided")


async def test_nothing_of_a_tenant_that_opted_out_is_mirrored(components: Components, tmp_path: pathlib.Path) -> None:
    keys, file = {"acme": new_key(), "quiet": new_key()}, tmp_path / "keys.toml"
    entries = [f'[[key]]\ntenant = "{name}"\nhash = "{hash_of(key)}"\n' for name, key in keys.items()]
    file.write_text("[tenant.acme]\n[tenant.quiet]\nkeep_content = false\n" + "".join(entries))
    records, reached = tmp_path / "records", components.folder / "records"
    edge = {"record_path": str(records), "record_content": "full", "record_share": 1.0, "api_keys": str(file)}
    async with components.another_gateway_address(**edge) as address:
        for key in keys.values():
            async with AsyncClient(address, api_key=key) as client:
                await ask(client, "chat")
        paths = await bundles_of(records, 2)
    found = {one.tenant: one for one in (bundles.read(path, None)[0] for path in paths)}
    assert (found["quiet"].content, found["quiet"].request.messages, found["quiet"].request.token_ids) == (
        "hash",
        (),
        (),
    )
    before = set(bundles_in(reached))
    status, tally, lines = await canary(records, components.gateway.grpc_address, wanted=2)
    assert (status, tally.all.counts, lines[1]) == (
        CanaryExit.UNDECIDED,
        {"equal": 1},
        "not replayed: 1 that cannot be replayed",
    )
    # The other gateway records all that reaches it.
    await until("the replay's bundle", lambda: set(bundles_in(reached)) > before)
    labels = [bundles.read(path, None)[0].request.label for path in set(bundles_in(reached)) - before]
    assert labels == [f"replay-{found['acme'].id}"]


async def test_a_wrong_kernel_and_a_changed_template_are_reported(
    components: Components, recorded: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = components.folder / "brief.jinja"
    other.write_text("Be brief. " + TEMPLATE)
    async with components.another_gateway_address(chat_template=str(other)) as address:
        # This gateway does not know the adapter, so its bundle is left out.
        status, tally, _ = await canary(recorded, address, "differs=1", wanted=len(KINDS) - 1)
        assert (status, tally.all.counts["prompt"]) == (CanaryExit.PROMOTE, 2)
        assert (await canary(recorded, address))[0] == CanaryExit.STOP
    sample = host_backend.sample

    def perturbed(logits: Any, rows: Any, largest: Any = None) -> Any:
        # A kernel that adds a hundredth to every other logit.
        logits[:, ::2] += 0.01
        return sample(logits, rows, None)

    monkeypatch.setattr(host_backend, "sample", perturbed)
    status, _, lines = await canary(recorded, components.gateway.grpc_address)
    assert (status, lines[-1].partition(":")[0]) == (CanaryExit.STOP, "stop")


async def test_other_weights_are_reported_with_the_margin(recorded: pathlib.Path, tmp_path: pathlib.Path) -> None:
    model, _ = recorded_model(tmp_path, seed=1)
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        async with running_components(
            pathlib.Path(name), model={"model": str(model), "dtype": "float32", "max_model_len": 512}
        ) as running:
            await until("the gateway to know the worker's model", running.client.models)
            target = running.gateway.grpc_address
            for path in bundles_in(recorded):
                bundle, _ = bundles.read(path, None)
                if bundle.request.sampling.temperature != 0:
                    continue
                with pytest.raises(ConfigError, match="--any-model"):
                    await replayed(path, target)
                status, lines = await replayed(path, target, any_model=True)
                assert (status, lines[-1].partition(" at ")[0]) == (1, "differs: answer 0")
                assert "margin " in lines[-1]
            assert (await canary(recorded, target))[0] == CanaryExit.STOP


async def test_a_workers_grammar_is_sent_as_a_client_can() -> None:
    lark = '%llguidance {}\nstart: (CHOICE)\nCHOICE: "a"\n'
    assert sent_grammar(lark) == lark
    joined = {"grammars": [{"name": "answer", "lark_grammar": "%llguidance {}\nstart: (@client)\n"},
                           {"name": "client", "lark_grammar": "start: A"}]}  # fmt: skip
    assert sent_grammar(msgspec.json.encode(joined).decode()) == "start: A"
    joined["grammars"][0]["lark_grammar"] = "%llguidance {}\nstart: (x) (@client)\n"
    with pytest.raises(ConfigError, match="tool calls"):
        sent_grammar(msgspec.json.encode(joined).decode())


async def test_the_model_is_found_by_its_weights_and_adapter() -> None:
    names = (("toy", ""), ("red", "ab"), ("blue", "cd"))
    models = [ModelInfo(name, 512, "weights", adapter=adapter) for name, adapter in names]
    for asked, adapter, wanted in (("gone", "", "toy"), ("gone", "cd", "blue"), ("red", "ab", "red")):
        bundle = bundle_of(model=BundleModel(name="toy", fingerprint="weights", asked=asked, adapter=adapter))
        assert model_of(bundle, models, "", any_model=False).name == wanted
        assert model_of(bundle, models, "red", any_model=True).name == "red"
    bundle = bundle_of(model=BundleModel(name="toy", fingerprint="weights", asked="red", adapter="ef"))
    with pytest.raises(ConfigError, match="has other weights"):
        model_of(bundle, models, "", any_model=False)
