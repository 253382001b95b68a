"""The page for people in a real Chromium: at a whole line with a random model, and at a gateway with scripted peers."""

from __future__ import annotations

import asyncio
import pathlib
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Locator, Route

from pillion.gateway.admission.api_keys import hash_of
from testbed.conditions import until
from testbed.tiny_model import save_model
from tests.support.browser import running_browser, seen_page
from tests.support.components import Components, running_components
from tests.support.fake_components import running_fake_cluster
from tests.support.http import call

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

KEYS = {"ops": "plk-" + "o" * 43, "acme": "plk-" + "a" * 43}
QUESTION = "Where do rivers end? " * 4
SYSTEM = "You are brief."
NARROW = {"viewport": {"width": 320, "height": 700}, "has_touch": True, "is_mobile": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with running_browser() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def components(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Components]:
    # After the browser, so that nothing is started where there is none.
    folder = tmp_path_factory.mktemp("ui")
    keys = "[tenant.ops]\noperator = true\n[tenant.acme]\n"
    keys += "".join(f'[[key]]\ntenant = "{name}"\nhash = "{hash_of(key)}"\n' for name, key in KEYS.items())
    (folder / "keys.toml").write_text(keys)
    model = {"model": str(save_model(folder / "tiny")), "dtype": "float32", "max_model_len": 512}
    edge = {"chunk_size": 32, "ui": True, "api_keys": str(folder / "keys.toml")}
    with tempfile.TemporaryDirectory(prefix="pil-") as name, pytest.MonkeyPatch.context() as environ:
        environ.setenv("PILLION_API_KEY", KEYS["ops"])
        async with running_components(pathlib.Path(name), model=model, gateway=edge) as running:
            await until("the gateway to know the worker's model", running.client.models)
            yield running


async def test_chat_by_keyboard_alone(browser: Browser, components: Components) -> None:
    """A wrong key is refused in words; the answer is the API's, and every token of its prompt is accounted for."""
    address = components.gateway.http_address
    async with seen_page(browser, address) as seen:
        page, keyboard = seen.page, seen.page.keyboard
        await page.get_by_label("API key").wait_for()
        assert await seen.complaints() == []
        # The field has the focus from the beginning.
        await keyboard.type("plk-wrong")
        await keyboard.press("Enter")
        refusal = page.get_by_role("alert")
        await refusal.filter(has_text="This API key is not known here").wait_for()
        assert not await page.locator("#parts").is_visible()
        await keyboard.press("Control+A")
        await keyboard.type(KEYS["acme"])
        await keyboard.press("Tab")
        await keyboard.press("Enter")
        await page.get_by_role("heading", name="Chat").wait_for()
        assert await page.evaluate("document.activeElement.id") == "prompt"
        # Back through the log to the settings, which open by the keyboard too.
        for _ in range(2):
            await keyboard.press("Shift+Tab")
        await keyboard.press("Enter")
        for text in (None, "0", "12", SYSTEM):
            await keyboard.press("Tab")
            if text is not None:
                await keyboard.press("Control+A")
                await keyboard.type(text)
        for _ in range(2):
            await keyboard.press("Tab")
        await keyboard.type(QUESTION)
        await keyboard.press("Enter")
        await page.locator(".figures").wait_for()
        (shown,) = await seen.texts(".answer .text:not(.thinking .text)")
        said = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION.strip()}]
        asked = {"model": "tiny", "messages": said, "temperature": 0, "max_completion_tokens": 12, "timings": True}
        reply = await call(address, "/v1/chat/completions", asked, headers={"Authorization": f"Bearer {KEYS['acme']}"})
        answer = reply.json
        assert shown == answer["choices"][0]["message"]["content"] != ""
        prompt = answer["usage"]["prompt_tokens"]
        assert await seen.texts(".answer .caption") == [f"Where the {prompt} tokens of the prompt went"]
        legend = await page.locator(".answer .legend li:visible").all_text_contents()
        assert [line.split(" ", 1)[1] for line in legend] == [
            "computed by a prefill worker",
            "computed by the decode worker, beside other streams",
        ]
        assert sum(int(line.split()[0]) for line in legend) == prompt
        # The API's own call came second, and found what the page's had left.
        timings = answer["timings"]
        assert timings["cached_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert [timings[f"{source}_tokens"] for source in ("fetched", "restored", "bucket")] == [0, 0, 0]
        assert sum(timings[f"{kind}_tokens"] for kind in ("cached", "prefilled", "tail")) == prompt
        # A tenant chats, and sees nothing of the others' work.
        await page.locator("#cluster-notice").filter(has_text="is for operators").wait_for()
        assert not await page.locator("#picture").is_visible()
        # Neither the address nor the browser's stores have the key.
        kept = "location.href + JSON.stringify(localStorage) + JSON.stringify(sessionStorage) + document.cookie"
        assert KEYS["acme"] not in await page.evaluate(kept)


@asynccontextmanager
async def steps_going_on(address: str) -> AsyncIterator[None]:
    """Keeps the workers busy, because a page shows only the steps since its last picture."""

    async def ask() -> None:
        body = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 200}
        while True:
            await call(address, "/v1/chat/completions", body, headers={"Authorization": f"Bearer {KEYS['acme']}"})

    asking = asyncio.create_task(ask())
    try:
        yield
    finally:
        asking.cancel()
        await asyncio.wait([asking])


async def test_operators_see_the_cluster(browser: Browser, components: Components) -> None:
    address = components.gateway.http_address
    async with seen_page(browser, address) as seen, steps_going_on(address):
        page = seen.page
        await seen.connect(KEYS["ops"])
        await seen.set(max_tokens="200", temperature="0")
        await seen.ask(QUESTION)
        names = page.locator(".card .name b")
        await names.nth(3).wait_for()
        assert {"prefill-0", "decode-0"} < set(await names.all_text_contents())
        assert [text.split()[0] for text in await seen.texts(".group h3")] == ["Gateways", "KV", "Prefill", "Decode"]
        # Steps come with heartbeats; their shares of the budget are in words as well as in the strip.
        worker = page.locator(".card", has=page.get_by_text("decode-0"))
        await worker.get_by_text("steps/s of").wait_for()
        strip = worker.get_by_role("img")
        label = await strip.get_attribute("aria-label")
        assert label.startswith("Step budget of decode-0")
        assert "unused" in label
        total = components.kvnode.pool.status().total_blocks
        await page.get_by_text(f"{total:,} blocks,").wait_for()
        await page.locator(".figures").wait_for()
        assert await seen.complaints() == []
        await page.get_by_role("button", name="Pause").click()
        assert await page.get_by_role("button", name="Go on").get_attribute("aria-pressed") == "true"
        await page.get_by_role("button", name="Forget the key").click()
        await page.get_by_label("API key").wait_for()
        assert await page.locator(".card").count() == 0
        assert await page.locator(".question").count() == 0
        # The next key's picture does not begin paused.
        await seen.connect(KEYS["ops"])
        await names.nth(3).wait_for()
        assert await page.get_by_role("button", name="Pause").get_attribute("aria-pressed") == "false"


async def test_a_worker_whose_record_expires_stays(browser: Browser, components: Components) -> None:
    """It goes from the workers to those that a KV node alone knows, where nobody tells its load, and back."""
    expired = {"role": "", "node_id": "kv-0", "state": "fenced", "steps": None}

    async def changed(route: Route) -> None:
        picture = await (await route.fetch()).json()
        for one in picture["components"]:
            if one["component_id"] == "decode-0":
                for name in ("queued_tokens", "free_seqs", "kernels", "adapters", "ranks"):
                    del one[name]
                one |= expired
        await route.fulfill(json=picture)

    async with seen_page(browser, components.gateway.http_address) as seen:
        page = seen.page
        await seen.connect(KEYS["ops"])

        def cards(title: str) -> Locator:
            groups = page.locator(".group").filter(has=page.get_by_role("heading", name=title))
            return groups.locator(".card").filter(has_text="decode-0")

        await cards("Decode workers").wait_for()
        await page.route("**/ui/cluster", changed)
        card = cards("Known to a KV node alone")
        await card.wait_for()
        assert await card.locator(".state").text_content() == "fenced"
        assert await card.locator(".line").all_text_contents() == ["–"]
        await page.unroute_all(behavior="wait")
        await cards("Decode workers").get_by_text("running").wait_for()
        assert await card.count() == 0


@pytest.mark.long
async def test_narrow_dark_and_still(browser: Browser, components: Components) -> None:
    """320 pixels are also what 400 % zoom leaves of 1,280 (WCAG 1.4.10)."""
    options = {**NARROW, "color_scheme": "dark", "reduced_motion": "reduce"}
    async with seen_page(browser, components.gateway.http_address, **options) as seen:
        await seen.connect(KEYS["ops"])
        await seen.set(max_tokens="8")
        await seen.ask(QUESTION)
        await seen.page.locator(".figures").wait_for()
        await seen.page.locator(".card").nth(3).wait_for()
        assert await seen.complaints() == []
        moved = "getComputedStyle(document.querySelector('.segment')).transitionDuration"
        assert await seen.page.evaluate(moved) == "0s"
        assert await seen.page.evaluate("document.scrollingElement.scrollWidth") == 320
        # However long the conversation is, it is in view together with the button that sends.
        await seen.ask(QUESTION)
        await seen.page.locator(".figures").nth(1).wait_for()
        await seen.page.locator("#log").scroll_into_view_if_needed()
        shown = await seen.page.get_by_role("button", name="Send").bounding_box()
        assert shown is not None
        assert 0 < shown["y"] < shown["y"] + shown["height"] <= 700
        # The page of the API fits as well.
        await seen.page.goto(f"http://{components.gateway.http_address}/docs")
        assert await seen.complaints() == []
        assert await seen.page.evaluate("document.scrollingElement.scrollWidth") == 320


async def test_answers_are_text_and_can_be_stopped(browser: Browser) -> None:
    """Markup of a model stays text; Escape cancels the request; a refusal gives the message back."""
    script = '<img src="http://127.0.0.1:9/x" onerror="document.title=1"> <b>bold</b>'
    async with running_fake_cluster(script, ui=True) as fakes, seen_page(browser, fakes.gateway.http_address) as seen:
        page = seen.page
        # Without keys there is nothing to enter.
        await seen.ask("hello")
        await page.locator(".figures").wait_for()
        assert await seen.texts(".answer .text:not(.thinking .text)") == [script]
        assert await page.locator("#log img, #log b:not(.legend b)").count() == 0
        assert await page.title() == "Pillion"
        assert await page.locator("#spoken").text_content() == f"Answer: {script}"
        fakes.decode.gate.clear()
        await seen.ask("again")
        await until("the second request", lambda: len(fakes.decode.submits) == 2)
        await page.keyboard.press("Escape")
        await page.locator(".below", has_text="Stopped.").wait_for()
        await until("the request to be cancelled", lambda: not fakes.gateway.gateway.active_requests)
        fakes.decode.gate.set()
        too_long = "too" + " long" * 20_000
        await seen.ask(too_long)
        await page.get_by_role("alert").filter(has_text="the model takes at most").wait_for()
        assert await page.get_by_label("Message", exact=True).input_value() == too_long
        # What failed is no part of the conversation.
        await seen.set(max_tokens="40")
        await seen.ask("short")
        await page.locator(".figures").nth(1).wait_for()
        assert len(fakes.decode.submits) == 3


async def test_a_chat_that_is_left_does_not_come_back(browser: Browser, tmp_path: pathlib.Path) -> None:
    """What an answer left behind is in no later chat, which may be that of another key."""
    keys = "".join(f'[[key]]\ntenant = "{name}"\nhash = "{hash_of(key)}"\n' for name, key in KEYS.items())
    (tmp_path / "keys.toml").write_text("[tenant.ops]\n[tenant.acme]\n" + keys)
    flags = {"ui": True, "api_keys": str(tmp_path / "keys.toml")}
    async with (
        running_fake_cluster("word " * 30, **flags) as fakes,
        seen_page(browser, fakes.gateway.http_address) as seen,
    ):
        page, answer = seen.page, seen.page.locator(".answer .text:not(.thinking .text)")

        async def asked(text: str) -> list[dict[str, str]]:
            """The messages that the page sends with ``text``, once the answer has begun, which then halts."""
            async with page.expect_request("**/v1/chat/completions") as found:
                await seen.ask(text)
            await answer.filter(has_text="word").last.wait_for()
            fakes.decode.gate.clear()
            return (await found.value).post_data_json["messages"]

        async def left(button: str) -> None:
            await page.get_by_role("button", name=button).click()
            await until("the request to be cancelled", lambda: not fakes.gateway.gateway.active_requests)
            await page.locator("#stop:disabled").wait_for(state="attached")
            fakes.decode.gate.set()

        # So slow that no answer ends by itself.
        fakes.decode.pace_s = 0.1
        system = {"role": "system", "content": SYSTEM}
        await seen.connect(KEYS["ops"])
        await seen.set(system=SYSTEM)
        assert await asked("first") == [system, {"role": "user", "content": "first"}]
        await left("New chat")
        assert await asked("second") == [system, {"role": "user", "content": "second"}]
        await page.get_by_label("Message", exact=True).fill("half a thought")
        await left("Forget the key")
        await seen.connect(KEYS["acme"])
        assert await page.get_by_label("Message", exact=True).input_value() == ""
        assert await asked("third") == [{"role": "user", "content": "third"}]
        assert await page.locator(".question").count() == 1
