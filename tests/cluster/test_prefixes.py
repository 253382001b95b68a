"""Prompts computed ahead and pinned, on the real parts with a small pool: pressure, tenants, APIs, another gateway."""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
import pytest_asyncio

from lab.testbed.conditions import WITHIN_S, until
from lab.testbed.tiny_model import save_model
from pillion import AsyncClient, NotFound, Overloaded
from pillion.errors import InvalidRequest
from pillion.gateway.admission.api_keys import hash_of
from tests.support.components import Components, running_components
from tests.support.cpu_model import needs_kernels
from tests.support.families import make_model
from tests.support.http import call
from tests.support.hybrids import HYBRIDS

BLOCK = 16
KEYS = {name: f"plk-{name}-" + name[0] * 40 for name in ("red", "blue")}
TENANTS = "[tenant.red]\n[tenant.blue]\nmax_pinned_tokens = 70\n"
PROMPT = list(range(2, 131))
WHOLE = len(PROMPT) // BLOCK
SYSTEM = "You are a patient librarian. " * 12
seeds = itertools.count(1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def components(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Components]:
    folder = tmp_path_factory.mktemp("prefixes")
    model = {"model": str(save_model(folder / "tiny")), "dtype": "float32", "max_model_len": 512, "block_size": BLOCK}
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        node = {"kv_pool_bytes": 2**20, "pinned_percent": 90}
        async with running_components(
            pathlib.Path(name), model=model, node=node, gateway={"chunk_size": 32}
        ) as running:
            await until("the gateway to know the worker's model", running.client.models)
            yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(components: Components, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """Run a second gateway that knows the tenants; yield its gRPC address."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(TENANTS + "".join(f'[[key]]\ntenant = "{n}"\nhash = "{hash_of(k)}"\n' for n, k in KEYS.items()))
    async with components.another_gateway_address(chunk_size=32, api_keys=str(path)) as address:
        yield address


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(autouse=True)
def patient_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow pin does not fail a cache_control."""
    for module in ("prefix_pins.prefix_pins", "anthropic.anthropic_api"):
        with contextlib.suppress(ImportError):
            monkeypatch.setattr(f"pillion.gateway.{module}.EPHEMERAL_WAIT_S", WITHIN_S)


async def cached(client: AsyncClient, prompt: Any = (*PROMPT, 5), **options: Any) -> int:
    """Return the number of cached tokens of a prompt."""
    deltas = [delta async for delta in client.generate(prompt, max_tokens=1, **options)]
    return deltas[-1].usage.cached_tokens


async def press(components: Components) -> None:
    """Serve prompts that fill the pool twice, each under a different salt."""
    slots = components.kvnode.pool.ledger.num_slots
    for _ in range(2 * slots // 24 + 1):
        await cached(components.client, [7] * (24 * BLOCK), cache_salt=f"pressure {next(seeds)}")
        # The next one would need memory that this one's ticket still holds.
        await components.proven()


async def test_warm_computes_once_and_generates_nothing(components: Components) -> None:
    client = components.client
    first = await client.warm_prefix(PROMPT)
    assert (first.computed_tokens, first.found_tokens, first.pin) == (len(PROMPT), 0, None)
    again = await client.warm_prefix(PROMPT)
    assert (again.computed_tokens, again.found_tokens) == (len(PROMPT) - WHOLE * BLOCK, WHOLE * BLOCK)
    assert await cached(client) == WHOLE * BLOCK
    assert await client.prefixes() == []
    await press(components)
    assert await cached(client) == 0, "what is not pinned leaves under pressure"
    await components.proven()


async def test_a_pin_survives_memory_pressure_until_it_is_dropped(components: Components) -> None:
    client = components.client
    pin = (await client.warm_prefix(PROMPT, pin=True, name="manual", ttl_s=600)).pin
    assert pin is not None
    assert (pin.name, pin.tokens, pin.blocks, pin.present_blocks) == ("manual", len(PROMPT), WHOLE, WHOLE)
    await press(components)
    assert await cached(client) == WHOLE * BLOCK
    async with components.another_gateway() as other:
        await until("the other gateway to know the model", other.models)
        (listed,) = await other.prefixes()
    assert (listed.name, listed.hits, listed.present_blocks, listed.node_id) == ("manual", 1, WHOLE, pin.node_id)
    assert 0 < listed.expires_in_s <= 600
    await client.drop_prefix("manual")
    assert await client.prefixes() == []
    with pytest.raises(NotFound):
        await client.drop_prefix("manual")
    await press(components)
    assert await cached(client) == 0
    await components.proven()


async def test_tenants_have_their_own_pins_and_quotas(components: Components, guarded: str) -> None:
    async with AsyncClient(guarded, api_key=KEYS["red"]) as red, AsyncClient(guarded, api_key=KEYS["blue"]) as blue:
        await until("the gateway to know the model", red.models)
        await red.warm_prefix(PROMPT, pin=True, name="mine")
        assert [pin.name for pin in await red.prefixes()] == ["mine"]
        assert await blue.prefixes() == [] == await components.client.prefixes()
        with pytest.raises(NotFound):
            await blue.drop_prefix("mine")
        assert await cached(blue) == 0
        with pytest.raises(Overloaded, match="at most 4"):
            await blue.warm_prefix(PROMPT, pin=True, name="mine")
        (await blue.warm_prefix(PROMPT[: 4 * BLOCK + 1], pin=True, name="mine"))
        assert [pin.blocks for pin in await blue.prefixes()] == [4]
        await press(components)
        assert await cached(red) == WHOLE * BLOCK
        assert await cached(blue) == 4 * BLOCK
        for tenant in (red, blue):
            await tenant.drop_prefix("mine")
    await components.proven()


async def test_a_request_that_needs_the_memory_of_pins_gets_it(components: Components) -> None:
    client, pool = components.client, components.kvnode.pool
    quota = pool.ledger.prefix_pins.max_owner_blocks
    pinned = [await client.warm_prefix([number, *PROMPT], pin=True) for number in range(2, 2 + quota // WHOLE)]
    assert len(pinned) > 1
    with pytest.raises(Overloaded):
        await client.warm_prefix([1, *PROMPT], pin=True)
    await press(components)
    assert all([await cached(client, [number, *PROMPT, 5]) for number in range(2, 2 + len(pinned))])
    for warmed in pinned:
        assert warmed.pin is not None
        await client.drop_prefix(warmed.pin.name)
    await components.proven()


async def test_http(components: Components) -> None:
    address, path = components.gateway.http_address, "/v1/cache/prefixes"
    made = await call(address, path, json.dumps({"tokens": PROMPT, "name": "web", "ttl_s": 60}).encode())
    assert made.status == 200, made
    answer = json.loads(made.body)
    assert answer["computed_tokens"] + answer["found_tokens"] == len(PROMPT)
    assert (answer["pin"]["name"], answer["pin"]["blocks"]) == ("web", WHOLE)
    listed = json.loads((await call(address, path)).body)
    assert [pin["name"] for pin in listed["data"]] == ["web"]
    assert (await call(address, f"{path}/web", method="DELETE")).status == 200
    assert (await call(address, f"{path}/web", method="DELETE")).status == 404
    for wrong in (
        {},
        {"prompt": ""},
        {"prompt": "x", "tokens": [1]},
        {"tokens": PROMPT, "name": "a b"},
        {"tokens": PROMPT, "ttl_s": -1},
        {"tokens": PROMPT, "ttl_s": 10**9},
        {"tokens": PROMPT, "cache_slat": "x"},
        {"prompt": "x"},
    ):
        assert (await call(address, path, json.dumps(wrong).encode())).status == 400, wrong
    assert json.loads((await call(address, path)).body)["data"] == []
    with pytest.raises(InvalidRequest):
        await components.client.warm_prefix(PROMPT, pin=True, ttl_s=-1)
    await components.proven()


async def test_a_warmed_conversation_renders_tools_like_its_requests(components: Components) -> None:
    address, path = components.gateway.http_address, "/v1/cache/prefixes"
    tools = [{"type": "function", "function": {"name": "shelf"}}]
    asked = {"messages": [{"role": "user", "content": "Where?"}], "tools": tools}
    warmed = json.loads((await call(address, path, {**asked, "pin": False})).body)
    tokens = warmed["computed_tokens"] + warmed["found_tokens"]
    answer = (await call(address, "/v1/chat/completions", {"model": "tiny", "max_tokens": 1, **asked})).json
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == tokens // BLOCK * BLOCK
    for prompt in ({"prompt": SYSTEM}, {"tokens": PROMPT}):
        for more in ({"tools": tools}, {"chat_template_kwargs": {"x": 1}}):
            refused = await call(address, path, {**prompt, **more})
            assert (refused.status, refused.error["param"]) == (400, next(iter(more)))
    for more in ({"tools": tools}, {"chat_template_kwargs": {"x": 1}}):
        with pytest.raises(InvalidRequest, match=next(iter(more))):
            await components.client.warm_prefix(PROMPT, **more)
    await components.proven()


async def ask(client: anthropic.AsyncAnthropic, **fields: Any) -> anthropic.types.Usage:
    asked: Any = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "A question."}], **fields}
    return (await client.messages.create(**asked)).usage


def marked(text: str, ttl: str | None = None) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"} | ({"ttl": ttl} if ttl else {})}


async def test_cache_control_pins_the_prefix_before_it(components: Components) -> None:
    url = f"http://{components.gateway.http_address}"
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=200) as client:
        first = await ask(client, system=[marked(SYSTEM, "1h")])
        assert first.cache_read_input_tokens == 0
        assert first.cache_creation is not None
        written = first.cache_creation.ephemeral_1h_input_tokens
        assert written == first.cache_creation_input_tokens
        assert len(SYSTEM) - BLOCK < written < len(SYSTEM) + BLOCK
        assert written % BLOCK == 0
        (pin,) = await components.client.prefixes()
        assert (pin.ephemeral, pin.blocks, pin.present_blocks) == (True, written // BLOCK, written // BLOCK)
        assert 3500 < pin.expires_in_s <= 3600
        await press(components)
        # Another question finds it, a turn that is longer takes the place of the one before, and usage adds up.
        turn = [{"role": "user", "content": [marked("Another question, which is long enough for some more blocks.")]}]
        second = await ask(client, system=[marked(SYSTEM, "1h")], messages=turn)
        assert second.cache_read_input_tokens == written
        assert second.cache_creation is not None
        assert second.cache_creation.ephemeral_1h_input_tokens == 0
        assert second.cache_creation.ephemeral_5m_input_tokens == second.cache_creation_input_tokens > 0
        longer = [*turn, {"role": "assistant", "content": "An answer."}, {"role": "user", "content": "And then?"}]
        third = await ask(client, system=[marked(SYSTEM)], messages=longer, cache_control={"type": "ephemeral"})
        assert third.cache_read_input_tokens >= written + second.cache_creation_input_tokens
        total = await client.messages.count_tokens(
            model="tiny", system=SYSTEM, messages=[{"role": "user", "content": "A question."}]
        )
        assert first.input_tokens + written == total.input_tokens
        names = {(one.name, one.expires_in_s > 300) for one in await components.client.prefixes()}
        assert len(names) == 2
        assert pin.name in {name for name, _ in names}
        with pytest.raises(anthropic.BadRequestError, match="at most 4"):
            await ask(client, system=[marked(str(number)) for number in range(5)])
        with pytest.raises(anthropic.BadRequestError):
            await ask(client, system=[marked("x", "2h")])
        plain = await ask(client, system=SYSTEM)
        assert plain.cache_creation_input_tokens == 0
        assert plain.cache_read_input_tokens == written
    for one in await components.client.prefixes():
        await components.client.drop_prefix(one.name)
    await components.proven()


@needs_kernels
async def test_cache_control_stores_a_state_on_the_first_request(tmp_path: pathlib.Path) -> None:
    """A model whose layers carry states goes on only from one, and none stands where nobody has parted yet."""
    folder, _ = make_model(tmp_path / "hybrid", HYBRIDS["qwen3-next"])
    model = {"model": str(folder), "dtype": "float32", "max_model_len": 512, "block_size": BLOCK}
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        async with running_components(pathlib.Path(name), model=model, gateway={"chunk_size": 32}) as components:
            await until("the gateway to know the worker's model", components.client.models)
            url = f"http://{components.gateway.http_address}"
            async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=200) as client:
                plain = {"model": "hybrid", "system": f"Plain: {SYSTEM}"}
                await ask(client, **plain)
                other = [{"role": "user", "content": "Something else."}]
                assert (await ask(client, messages=other, **plain)).cache_read_input_tokens == 0
                first = await ask(client, model="hybrid", system=[marked(SYSTEM)])
                second = await ask(client, model="hybrid", system=[marked(SYSTEM)], messages=other)
                assert second.cache_read_input_tokens == first.cache_creation_input_tokens > len(SYSTEM) - BLOCK
            for one in await components.client.prefixes():
                await components.client.drop_prefix(one.name)
            await components.proven()


async def test_cache_control_beyond_the_quota_is_not_an_error(components: Components) -> None:
    prefix_pins = components.kvnode.pool.ledger.prefix_pins
    refused = prefix_pins.refused_ever
    quota = prefix_pins.max_owner_blocks
    url = f"http://{components.gateway.http_address}"
    pins = [await components.client.warm_prefix([n, *PROMPT], pin=True) for n in range(2, 2 + quota // WHOLE)]
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=200) as client:
        usage = await ask(client, system=[marked("Something else. " * 16)])
    assert prefix_pins.refused_ever == refused + 1
    assert usage.cache_creation_input_tokens == 0
    for warmed in pins:
        assert warmed.pin is not None
        await components.client.drop_prefix(warmed.pin.name)
    await components.proven()
