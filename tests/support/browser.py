"""A real Chromium without a window, on a page of the gateway: what it asks and says is kept for the test to judge."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, async_playwright

from lab.testbed.conditions import WITHIN_S

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# A browser that asks nobody anything by itself. Playwright gives each one an empty profile.
QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
# The rules that WCAG 2.2 AA makes of a page, and axe's own of good practice.
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


@contextlib.asynccontextmanager
async def running_browser() -> AsyncIterator[Browser]:
    """Yields a browser; skips the test where there is none."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("no Chromium or Chrome is installed (Debian's package chromium)")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program, args=list(QUIET))
        try:
            yield browser
        finally:
            await browser.close()


@dataclass
class SeenPage:
    """A page at a gateway's /ui. ``strayed``: requests that went elsewhere; ``said``: errors on the console."""

    page: Page
    strayed: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    async def connect(self, key: str) -> None:
        """Gives the page a key."""
        await self.page.get_by_label("API key").fill(key)
        await self.page.get_by_role("button", name="Connect").click()
        await self.page.get_by_role("heading", name="Chat").wait_for()

    async def set(self, **settings: str) -> None:
        """Fills the fields of the settings, by their ids with ``_`` for ``-``."""
        await self.page.locator("#settings").evaluate("one => { one.open = true }")
        for name, text in settings.items():
            await self.page.locator(f"#{name.replace('_', '-')}").fill(text)

    async def ask(self, text: str) -> None:
        """Sends a message."""
        await self.page.get_by_label("Message", exact=True).fill(text)
        await self.page.keyboard.press("Enter")

    async def kept_turns(self) -> list[dict[str, Any]]:
        """The turns of the chat that a reload would give back, once an answer has ended."""
        chat = "localStorage['pillion-chat-' + JSON.parse(sessionStorage['pillion-open-chat']).id]"
        turns: list[dict[str, Any]] = await self.page.evaluate(f"JSON.parse({chat}).turns")
        return turns

    async def texts(self, selector: str) -> list[str]:
        """The texts of all elements, as they are in the document."""
        return [text or "" for text in await self.page.locator(selector).all_text_contents()]

    async def complaints(self) -> list[tuple[str, list[Any]]]:
        """What axe-core finds wrong: rules, and where."""
        options = {"runOnly": {"type": "tag", "values": RULES}, "resultTypes": ["violations"]}
        found = (await Axe().run(self.page, options=options)).response["violations"]
        return [(one["id"], [node["target"] for node in one["nodes"]]) for one in found]


@contextlib.asynccontextmanager
async def seen_page(browser: Browser, address: str, **options: Any) -> AsyncIterator[SeenPage]:
    """Opens /ui at ``address`` in a fresh profile; the end of the block proves that no request went elsewhere, and that
    no script failed."""
    origin = f"http://{address}/"
    context = await browser.new_context(**options)
    context.set_default_timeout(WITHIN_S * 1000)
    seen = SeenPage(await context.new_page())

    def asked(url: str) -> None:
        if not url.startswith((origin, "data:")):
            seen.strayed.append(url)

    def wrote(kind: str, text: str) -> None:
        # The browser itself writes one for every refused request, which the page tells in its own words.
        if kind in ("error", "warning") and not text.startswith("Failed to load resource"):
            seen.said.append(text)

    seen.page.on("request", lambda request: asked(request.url))
    seen.page.on("console", lambda message: wrote(message.type, message.text))
    seen.page.on("pageerror", lambda error: seen.said.append(str(error)))
    try:
        await seen.page.goto(f"{origin}ui")
        yield seen
        assert (seen.strayed, seen.said) == ([], [])
    finally:
        await context.close()
