"""Reads the files of the page for people (--ui), and the headers that they are sent with.

The page holds no data and no key. What it may do is bounded by its policy: it runs this port's scripts alone, asks this
port alone, is framed by nobody, sends no form and writes no HTML from text (Trusted Types).
"""

from __future__ import annotations

import pathlib
from dataclasses import dataclass

FOLDER = pathlib.Path(__file__).parent / "page"
PAGE = "page.html"
TYPES = {".html": b"text/html", ".css": b"text/css", ".js": b"text/javascript"}
POLICY = b"; ".join(
    (
        b"default-src 'none'",
        b"script-src 'self'",
        b"style-src 'self'",
        b"connect-src 'self'",
        b"img-src data:",
        b"base-uri 'none'",
        b"form-action 'none'",
        b"frame-ancestors 'none'",
        b"require-trusted-types-for 'script'",
        b"trusted-types 'none'",
    )
)
HEADERS = [
    (b"content-security-policy", POLICY),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


@dataclass(frozen=True, slots=True)
class UiFile:
    """Holds one file of the page for people, as it is sent."""

    body: bytes
    content_type: bytes


def read_files() -> dict[str, UiFile]:
    """Returns all files of the page for people by name, some 180 KB, which a gateway keeps in memory."""
    return {
        path.name: UiFile(path.read_bytes(), TYPES[path.suffix] + b"; charset=utf-8")
        for path in sorted(FOLDER.iterdir())
        if path.suffix in TYPES
    }
