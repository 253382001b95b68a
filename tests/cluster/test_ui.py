"""The page for people in a real Chromium: at a whole line with a random model, and at a gateway with scripted peers."""

from __future__ import annotations

import asyncio
import json
import pathlib
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Locator, Route

from lab.testbed.conditions import until
from lab.testbed.recorded_requests import bundles_in
from lab.testbed.tiny_model import save_model
from pillion.gateway.admission.api_keys import hash_of
from pillion.records.bundle import read
from pillion.records.explanation import phases, sentences
from tests.support.browser import SeenPage, running_browser, seen_page
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
    # After the browser, so that nothing starts without one.
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


async def test_chat_works_by_keyboard_only(browser: Browser, components: Components) -> None:
    """A wrong key is refused in words; the answer is the API's, and every token of its prompt is accounted for."""
    address = components.gateway.http_address
    async with seen_page(browser, address) as seen:
        page, keyboard = seen.page, seen.page.keyboard
        await page.get_by_label("API key").wait_for()
        assert await seen.complaints() == []
        await keyboard.type("plk-wrong")
        await keyboard.press("Enter")
        refusal = page.get_by_role("alert")
        await refusal.filter(has_text="This gateway does not know this API key").wait_for()
        assert not await page.locator("#parts").is_visible()
        await keyboard.press("Control+A")
        await keyboard.type(KEYS["acme"])
        await keyboard.press("Tab")
        await keyboard.press("Enter")
        await page.get_by_role("heading", name="Chat").wait_for()
        assert await page.evaluate("document.activeElement.id") == "prompt"
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
        (shown,) = (turn["text"] for turn in await seen.kept_turns())
        said = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION.strip()}]
        asked = {"model": "tiny", "messages": said, "temperature": 0, "max_completion_tokens": 12, "timings": True}
        reply = await call(address, "/v1/chat/completions", asked, headers={"Authorization": f"Bearer {KEYS['acme']}"})
        answer = reply.json
        assert shown == answer["choices"][0]["message"]["content"] != ""
        prompt = answer["usage"]["prompt_tokens"]
        assert await seen.texts(".answer .caption") == [f"Where the prompt’s {prompt} tokens came from"]
        legend = await page.locator(".answer .legend li:visible").all_text_contents()
        assert [line.split(" ", 1)[1] for line in legend] == [
            "computed by a prefill worker",
            "computed by the decode worker, alongside other streams",
        ]
        assert sum(int(line.split()[0]) for line in legend) == prompt
        timings = answer["timings"]
        assert timings["cached_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert [timings[f"{source}_tokens"] for source in ("fetched", "restored", "bucket")] == [0, 0, 0]
        assert sum(timings[f"{kind}_tokens"] for kind in ("cached", "prefilled", "tail")) == prompt
        await page.locator("#cluster-notice").filter(has_text="is for operators").wait_for()
        assert not await page.locator("#picture").is_visible()
        # Neither the address nor the browser's stores have the key.
        kept = "location.href + JSON.stringify(localStorage) + JSON.stringify(sessionStorage) + document.cookie"
        assert KEYS["acme"] not in await page.evaluate(kept)


@asynccontextmanager
async def steps_going_on(address: str) -> AsyncIterator[None]:
    """Keep the workers busy, since a page shows only the steps since its last picture."""

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
        assert await page.get_by_role("button", name="Resume").get_attribute("aria-pressed") == "true"
        await page.get_by_role("button", name="Forget the key").click()
        await page.get_by_label("API key").wait_for()
        assert await page.locator(".card").count() == 0
        assert await page.locator(".question").count() == 0
        await seen.connect(KEYS["ops"])
        await names.nth(3).wait_for()
        assert await page.get_by_role("button", name="Pause").get_attribute("aria-pressed") == "false"


async def test_a_worker_with_an_expired_record_stays_listed(browser: Browser, components: Components) -> None:
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
        card = cards("Known only to a KV node")
        await card.wait_for()
        assert await card.locator(".state").text_content() == "fenced"
        assert await card.locator(".line").all_text_contents() == ["–"]
        await page.unroute_all(behavior="wait")
        await cards("Decode workers").get_by_text("running").wait_for()
        assert await card.count() == 0


@pytest.mark.parametrize(
    "options",
    [NARROW, {"viewport": {"width": 390, "height": 844}, "has_touch": True}, {"viewport": NARROW["viewport"]}],
)
async def test_stop_and_send_are_side_by_side_on_a_phone(browser: Browser, options: dict[str, Any]) -> None:
    async with (
        running_fake_cluster(ui=True) as fakes,
        seen_page(browser, fakes.gateway.http_address, **options) as seen,
    ):
        buttons = [seen.page.locator(f"#{name}") for name in ("stop", "send")]
        for button in buttons:
            await button.wait_for()
        stop, send = [await button.bounding_box() for button in buttons]
        assert stop is not None
        assert send is not None
        assert stop["y"] == send["y"]
        assert stop["x"] + stop["width"] <= send["x"]
        assert stop["height"] == send["height"]


async def test_the_timeline_of_a_recorded_request_is_drawn(browser: Browser, tmp_path: pathlib.Path) -> None:
    async with (
        running_fake_cluster(ui=True, record_path=str(tmp_path), record_share=1.0) as fakes,
        seen_page(browser, fakes.gateway.http_address, **NARROW) as seen,
    ):
        about, page = seen.page.locator("#records-about"), seen.page
        await about.filter(has_text="Nothing recorded yet").wait_for()
        async for _ in fakes.client.generate("Hello", request_id="mine"):
            pass
        await until("a bundle", lambda: bundles_in(tmp_path))
        await page.get_by_role("button", name="Refresh").click()
        await page.get_by_text("mine, toy: share").click()
        await page.get_by_text("The first token came after").wait_for()
        (bundle,) = bundles_in(tmp_path)
        told, _ = read(bundle, None)
        assert await seen.texts(".story > p") == sentences(told)
        assert [text.split(" ", 2)[2] for text in await seen.texts(".story .line")] == [
            phase.words for phase in phases(told)
        ]
        widths = [(await one.bounding_box() or {})["width"] for one in await page.locator(".story .track").all()]
        assert min(widths) > 200
        assert await seen.complaints() == []
        assert await page.evaluate("document.scrollingElement.scrollWidth") == 320


@pytest.mark.long
async def test_the_page_adapts_to_narrow_dark_and_reduced_motion(browser: Browser, components: Components) -> None:
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
        await seen.page.goto(f"http://{components.gateway.http_address}/docs")
        assert await seen.complaints() == []
        assert await seen.page.evaluate("document.scrollingElement.scrollWidth") == 320


async def test_answers_are_text_and_can_be_stopped(browser: Browser) -> None:
    """Markup of a model stays text; Escape cancels the request; a refusal gives the message back."""
    script = '<img src="http://127.0.0.1:9/x" onerror="document.title=1"> <b>bold</b>'
    async with running_fake_cluster(script, ui=True) as fakes, seen_page(browser, fakes.gateway.http_address) as seen:
        page = seen.page
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
        await page.get_by_role("alert").filter(has_text="maximum context length").wait_for()
        assert await page.get_by_label("Message", exact=True).input_value() == too_long
        await seen.set(max_tokens="40")
        await seen.ask("short")
        await page.locator(".figures").nth(1).wait_for()
        assert len(fakes.decode.submits) == 3


def events_of(*texts: str, thought: str = "") -> str:
    """Return a chat completion's stream as the gateway sends it, in these pieces, after a comment."""
    deltas = [{"reasoning_content": thought}] if thought else []
    choices = [{"index": 0, "delta": delta} for delta in [*deltas, *({"content": text} for text in texts)]]
    events = [json.dumps({"id": "chatcmpl-1", "choices": [choice]}) for choice in choices]
    return "".join(f"{line}\n\n" for line in (": waiting", *(f"data: {one}" for one in [*events, "[DONE]"])))


@asynccontextmanager
async def scripted_answers(seen: SeenPage, *answers: str) -> AsyncIterator[list[list[dict[str, str]]]]:
    """Answer the page's requests with these streams in turn; yield the messages that were sent."""
    left, asked = list(answers), list[list[dict[str, str]]]()

    async def answer(route: Route) -> None:
        asked.append(route.request.post_data_json["messages"])
        await route.fulfill(status=200, content_type="text/event-stream", body=left.pop(0))

    await seen.page.route("**/v1/chat/completions", answer)
    yield asked
    assert not left
    await seen.page.unroute_all(behavior="wait")


MARKDOWN = """# Rivers

They end in **a sea**, *or* in a `lake`,
as [this page](https://example.org/rivers "says") and <https://example.org/x> say.

- one
- two

```python
print("<b>river</b>")
```

| River | km |
|:--|--:|
| Rhine | 1230 |
"""
HOSTILE = """<img src="/x" onerror="document.title='hit'"> <script>document.title='hit'</script>

<svg onload="document.title='hit'"><style>body { display: none }</style></svg>

<iframe srcdoc="<script>parent.document.title='hit'</script>"></iframe>

[one](javascript:document.title='hit') [two](JaVaScRiPt:document.title='hit') [three](data:text/html,<script>1</script>)
[four](&#106;avascript:document.title='hit') [five](java\tscript:document.title='hit') <javascript:document.title='hit'>
[six](vbscript:x) [seven](file:///etc/passwd) [eight](//127.0.0.1:9/x) [nine](/ui/cluster) [ten]: javascript:1

![x](http://127.0.0.1:9/x "onerror=document.title='hit'") ![y](javascript:document.title='hit')
![z](data:image/svg+xml,<svg/>)

[a" onmouseover="document.title='hit'](https://example.org/"onmouseover="x)

```"><img src=x onerror=document.title='hit'>
</code></pre><img src=x onerror="document.title='hit'">
```

| <img src=x onerror="document.title='hit'"> |
|:-:|
| <b onclick="document.title='hit'">x</b> |
"""


async def test_answers_are_markdown(browser: Browser) -> None:
    async with running_fake_cluster(ui=True) as fakes, seen_page(browser, fakes.gateway.http_address) as seen:
        pieces = [MARKDOWN[at : at + 7] for at in range(0, len(MARKDOWN), 7)]
        async with scripted_answers(seen, events_of(*pieces, thought="I *think*.")):
            await seen.ask("Where do rivers end?")
            shown = seen.page.locator(".answer:not(.busy) .markdown:not(.thinking .markdown)")
            await shown.wait_for()
        for selector, text in (
            ("h4", "Rivers"),
            ("strong", "a sea"),
            ("em", "or"),
            ("p code", "lake"),
            ("li", "onetwo"),
            ("pre code", 'print("<b>river</b>")'),
            (".code-head span", "python"),
            ("th", "Riverkm"),
            ("td.to-right", "1230"),
        ):
            assert "".join(await shown.locator(selector).all_text_contents()) == text
        links = await shown.locator("a").evaluate_all("all => all.map((one) => [one.href, one.target, one.rel])")
        hosts = ["https://example.org/rivers", "https://example.org/x"]
        assert links == [[href, "_blank", "noopener noreferrer"] for href in hosts]
        assert await seen.page.locator(".thinking em").text_content() == "think"
        assert await seen.complaints() == []


async def test_nothing_in_an_answer_runs_or_loads(browser: Browser) -> None:
    """Neither while it comes in pieces nor when it is whole, nor after a reload; ``seen_page`` sees every request."""
    async with running_fake_cluster(ui=True) as fakes, seen_page(browser, fakes.gateway.http_address) as seen:
        page = seen.page
        async with scripted_answers(seen, events_of(*HOSTILE, thought=HOSTILE), events_of(HOSTILE * 50)):
            await seen.ask(HOSTILE)
            await page.locator(".answer:not(.busy)").wait_for()
            await seen.ask("more")
            await page.locator(".answer:not(.busy)").nth(1).wait_for()
        for _ in range(2):
            await page.locator(".thinking").first.evaluate("one => { one.open = true }")
            found = (
                "all => all.flatMap((one) => [one.tagName, ...one.getAttributeNames()]).map((one) => one.toLowerCase())"
            )
            names = set(await page.locator("#log .markdown *").evaluate_all(found))
            assert not names & {"img", "script", "style", "iframe", "svg", "object", "embed", "form", "input", "src"}
            assert not [name for name in names if name.startswith("on")]
            links = set(await page.locator("#log a").evaluate_all("all => all.map((one) => new URL(one.href).origin)"))
            assert links <= {"https://example.org", "http://127.0.0.1:9"}
            assert await page.title() == "Pillion"
            await page.reload()
            await page.locator(".answer").nth(1).wait_for()


async def test_answers_can_be_copied_and_retried_and_questions_edited(browser: Browser) -> None:
    async with running_fake_cluster(ui=True) as fakes, seen_page(browser, fakes.gateway.http_address) as seen:
        page, address = seen.page, fakes.gateway.http_address
        await page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=f"http://{address}")
        said = [events_of(text) for text in ("`1`\n", "two", "another two", "```\nthree\n```")]
        async with scripted_answers(seen, *said) as asked:
            ended = page.locator(".answer:not(.busy)")
            for number in range(2):
                await seen.ask(f"q{number}")
                await ended.nth(number).wait_for()
            await page.get_by_label("Copy this answer").first.click()
            await page.get_by_role("button", name="Copy this answer").filter(has_text="Copied").wait_for()
            assert await page.evaluate("navigator.clipboard.readText()") == "`1`\n"
            assert await page.locator(".retry:visible").count() == 1
            await page.locator(".retry:visible").click()
            await page.locator(".answer", has_text="another two").wait_for()
            assert asked[2] == asked[1]
            assert await ended.count() == 2
            await page.get_by_label("Edit this message").first.click()
            field = page.get_by_label("Message", exact=True)
            assert await field.input_value() == "q0"
            assert await seen.complaints() == []
            await page.get_by_role("button", name="Cancel editing").click()
            assert (await field.input_value(), await ended.count()) == ("", 2)
            await page.get_by_label("Edit this message").first.click()
            await seen.ask("q0, but better")
            await page.get_by_label("Copy this code").wait_for()
            assert asked[3] == [{"role": "user", "content": "q0, but better"}]
            assert await ended.count() == 1
            await page.get_by_label("Copy this code").click()
            assert await page.evaluate("navigator.clipboard.readText()") == "three"


@pytest.mark.long
async def test_a_reload_keeps_the_chat(browser: Browser, tmp_path: pathlib.Path) -> None:
    """For the same key alone; settings are kept as well, and the answer that was under way as far as it had come."""
    keys = "".join(f'[[key]]\ntenant = "{name}"\nhash = "{hash_of(key)}"\n' for name, key in KEYS.items())
    (tmp_path / "keys.toml").write_text("[tenant.ops]\n[tenant.acme]\n" + keys)
    flags = {"ui": True, "api_keys": str(tmp_path / "keys.toml")}
    async with running_fake_cluster(**flags) as fakes, seen_page(browser, fakes.gateway.http_address) as seen:
        page, ended = seen.page, seen.page.locator(".answer:not(.busy)")
        await seen.connect(KEYS["ops"])
        most = page.locator("#max-tokens")
        assert await most.input_value() == "1024"
        await seen.set(max_tokens="30", system=SYSTEM)
        await seen.ask("first")
        await page.locator(".figures").wait_for()
        fakes.decode.gate.clear()
        await seen.ask("second")
        await until("the second request", lambda: len(fakes.decode.submits) == 2)
        await page.reload()
        await until("the request to be cancelled", lambda: not fakes.gateway.gateway.active_requests)
        fakes.decode.gate.set()
        await seen.connect(KEYS["ops"])
        assert await page.locator(".question .text").all_text_contents() == ["first", "second"]
        assert await ended.locator(".figures").count() == 1
        await ended.nth(1).get_by_text("You left the page before the answer ended.").wait_for()
        assert (await most.input_value(), await page.locator("#system").input_value()) == ("30", SYSTEM)
        async with page.expect_request("**/v1/chat/completions") as found:
            await seen.ask("third")
        sent = [(one["role"], one["content"]) for one in (await found.value).post_data_json["messages"]]
        assert sent == [("system", SYSTEM), ("user", "first"), ("assistant", "The answer."), ("user", "third")]
        await page.locator(".figures").nth(1).wait_for()
        stores = "JSON.stringify(localStorage) + JSON.stringify(sessionStorage) + document.cookie"
        assert KEYS["ops"] not in await page.evaluate(stores)
        await page.reload()
        await seen.connect(KEYS["acme"])
        assert await page.locator(".question").count() == 0
        assert await page.locator("#system").input_value() == ""
        await page.reload()
        await seen.connect(KEYS["ops"])
        assert await page.locator(".question").count() == 0


async def test_stored_chats_are_limited(browser: Browser) -> None:
    async with running_fake_cluster(ui=True) as fakes, seen_page(browser, fakes.gateway.http_address) as seen:
        async with scripted_answers(seen, *[events_of(f"{name} " + "x" * 400_000) for name in "abc"]):
            for number, name in enumerate("abc"):
                await seen.ask(name)
                await seen.page.locator(".answer:not(.busy)").nth(number).wait_for()
        assert [turn["question"] for turn in await seen.kept_turns()] == ["b", "c"]


async def test_chats_are_listed_opened_and_deleted(browser: Browser) -> None:
    """In every tab, by the keyboard as well, and a bounded number of them."""
    async with running_fake_cluster(ui=True) as fakes, seen_page(browser, fakes.gateway.http_address) as seen:
        page, answers = seen.page, seen.page.locator(".answer:not(.busy)")
        listed = page.locator("#chat-list .open")
        async with scripted_answers(seen, events_of("one"), events_of("two"), events_of("three")) as asked:
            await seen.set(system=SYSTEM)
            await seen.ask("first")
            await answers.wait_for()
            await page.get_by_role("button", name="New chat").click()
            assert await answers.count() == 0
            await seen.set(system="")
            await seen.ask("second")
            await answers.wait_for()
            await page.locator("#chats summary").focus()
            await page.keyboard.press("Enter")
            assert await listed.all_text_contents() == ["second", "first"]
            assert await page.locator("#chat-list [aria-current]").text_content() == "second"
            assert await seen.complaints() == []
            await listed.nth(1).focus()
            await page.keyboard.press("Enter")
            await page.locator(".question", has_text="first").wait_for()
            assert await page.locator("#system").input_value() == SYSTEM
            await seen.ask("third")
            await answers.nth(1).wait_for()
            assert [one["content"] for one in asked[2]] == [SYSTEM, "first", "one", "third"]
        other = await page.context.new_page()
        await other.goto(page.url)
        await other.locator("#chats summary").click()
        await other.locator("#chat-list .open", has_text="first").click()
        assert await other.locator(".question .text").all_text_contents() == ["first", "third"]
        other.on("dialog", lambda dialog: dialog.accept())
        await other.get_by_label("Delete the chat “first”").click()
        assert await other.locator(".question").count() == 0
        assert await other.locator("#chat-list .open").all_text_contents() == ["second"]
        await listed.nth(1).wait_for(state="detached")
        await other.evaluate(
            """const one = Object.entries(localStorage).find(([name]) => name.startsWith("pillion-chat-"));
            for (let n = 0; n < 200; n++) localStorage.setItem("pillion-chat-" + n, one[1]);"""
        )
        async with scripted_answers(seen, events_of("four")):
            await seen.ask("fourth")
            await answers.nth(2).wait_for()
        assert (await listed.count(), await listed.first.text_content()) == (100, "first")


async def test_an_answer_that_broke_off_can_be_continued(browser: Browser) -> None:
    """The gateway may have died meanwhile, or the page been reloaded."""
    cut = events_of("Rivers end ").removesuffix("data: [DONE]\n\n")
    async with running_fake_cluster(ui=True) as fakes, seen_page(browser, fakes.gateway.http_address) as seen:
        page, more = seen.page, seen.page.get_by_role("button", name="Continue")
        bodies: list[dict[str, Any]] = []
        left = [cut, events_of("in "), events_of("a sea.")]

        async def answer(route: Route) -> None:
            bodies.append(route.request.post_data_json)
            await route.fulfill(status=200, content_type="text/event-stream", body=left.pop(0))

        await page.route("**/v1/chat/completions", answer)
        await seen.ask("Where do rivers end?")
        await page.get_by_role("alert").filter(has_text="The answer ended prematurely.").wait_for()
        assert await seen.complaints() == []
        await page.reload()
        await more.click()
        await page.locator(".answer:not(.busy)", has_text="Rivers end in").wait_for()
        assert not await more.is_visible()
        said = [("user", "Where do rivers end?"), ("assistant", "Rivers end ")]
        assert [(one["role"], one["content"]) for one in bodies[1]["messages"]] == said
        assert (bodies[1]["add_generation_prompt"], bodies[1]["continue_final_message"]) == (False, True)
        await seen.ask("Go on.")
        await page.locator(".answer:not(.busy)", has_text="a sea.").wait_for()
        assert "continue_final_message" not in bodies[2]
        await page.unroute_all(behavior="wait")
        fakes.decode.hold_after = 3
        await seen.ask("again")
        await page.locator(".answer", has_text="The").last.wait_for()
        await page.keyboard.press("Escape")
        await page.locator(".below", has_text="Stopped.").wait_for()
        partial = (await seen.kept_turns())[-1]["text"]
        fakes.decode.go_on()
        await more.click()
        await page.locator(".figures").wait_for()
        assert (await seen.kept_turns())[-1]["text"] == partial + "The answer."


async def test_the_clusters_panel_folds(browser: Browser) -> None:
    """It stays folded, and asks for no picture then."""
    async with running_fake_cluster(ui=True) as fakes, seen_page(browser, fakes.gateway.http_address) as seen:
        page = seen.page
        await page.locator(".card").first.wait_for()
        await page.get_by_role("heading", name="Cluster").click()
        await page.locator(".card").first.wait_for(state="hidden")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        await page.reload()
        await page.get_by_text("Connected", exact=True).wait_for()
        assert not await page.locator("#tiles").is_visible()
        assert await seen.complaints() == []
        assert not [url for url in asked if url.endswith("/ui/cluster")]
        await page.locator("#cluster-fold summary").press("Enter")
        await page.locator(".card").first.wait_for()


async def test_connected_is_shown_only_while_the_gateway_responds(browser: Browser) -> None:
    async with running_fake_cluster(ui=True) as fakes, seen_page(browser, fakes.gateway.http_address) as seen:
        words, page = seen.page.locator("#connection"), seen.page
        await words.get_by_text("Connected", exact=True).wait_for()
        away = [re.compile(".*/v1/models"), re.compile(".*/ui/cluster")]
        for path in away:
            await page.route(path, lambda route: route.abort())
        await words.filter(has_text="Not connected. The gateway cannot be reached.").wait_for()
        await page.unroute_all(behavior="wait")
        await words.get_by_text("Connected", exact=True).wait_for()


async def test_an_abandoned_answer_does_not_appear_in_a_later_chat(browser: Browser, tmp_path: pathlib.Path) -> None:
    """Remains of an answer are in no later chat, which may be under another key."""
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
