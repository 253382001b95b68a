"""A real headless Chromium on a page of the gateway, which records requests and console messages."""

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
# Options that stop the browser's own requests. Playwright gives each one an empty profile.
QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


@contextlib.asynccontextmanager
async def running_browser() -> AsyncIterator[Browser]:
    """Yield a browser; skip the test if none is installed."""
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
    """A page at a gateway's /ui. ``strayed``: requests to other hosts; ``said``: errors on the console."""

    page: Page
    strayed: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    async def connect(self, key: str) -> None:
        """Enter a key."""
        await self.page.get_by_label("API key").fill(key)
        await self.page.get_by_role("button", name="Connect").click()
        await self.page.get_by_role("heading", name="Chat").wait_for()

    async def set(self, **settings: str) -> None:
        """Fill fields of the settings, by id with ``_`` for ``-``."""
        await self.page.locator("#settings").evaluate("one => { one.open = true }")
        for name, text in settings.items():
            await self.page.locator(f"#{name.replace('_', '-')}").fill(text)

    async def ask(self, text: str) -> None:
        """Send a message."""
        await self.page.get_by_label("Message", exact=True).fill(text)
        await self.page.keyboard.press("Enter")

    async def kept_turns(self) -> list[dict[str, Any]]:
        """Return the chat's turns as a reload restores them, once an answer has ended."""
        chat = "localStorage['pillion-chat-' + JSON.parse(sessionStorage['pillion-open-chat']).id]"
        turns: list[dict[str, Any]] = await self.page.evaluate(f"JSON.parse({chat}).turns")
        return turns

    async def texts(self, selector: str) -> list[str]:
        """Return the texts of all matching elements."""
        return [text or "" for text in await self.page.locator(selector).all_text_contents()]

    async def complaints(self) -> list[tuple[str, list[Any]]]:
        """Return axe-core's findings: rules, and where."""
        options = {"runOnly": {"type": "tag", "values": RULES}, "resultTypes": ["violations"]}
        found = (await Axe().run(self.page, options=options)).response["violations"]
        return [(one["id"], [node["target"] for node in one["nodes"]]) for one in found]


@contextlib.asynccontextmanager
async def seen_page(browser: Browser, address: str, **options: Any) -> AsyncIterator[SeenPage]:
    """Open /ui at ``address`` in a fresh profile; then check that no request went elsewhere and no script failed."""
    origin = f"http://{address}/"
    context = await browser.new_context(**options)
    context.set_default_timeout(WITHIN_S * 1000)
    seen = SeenPage(await context.new_page())

    def asked(url: str) -> None:
        if not url.startswith((origin, "data:")):
            seen.strayed.append(url)

    def wrote(kind: str, text: str) -> None:
        # Written by the browser for every refused request, which the page reports itself.
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
