"""A real browser. Without one these tests are skipped with a message; `make browser` installs one if it can."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Route, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)

PATIENCE_MS = 60_000
"""A timeout for a machine with more work than cores. Elsewhere waits take a second or two."""

Open = Callable[..., Page]
"""Opens an address in a window of its own; keywords are those of a Playwright context."""


def endless(route: Route) -> None:
    """Make the request ignore the end of text, so that only a stop ends the answer: a random model may end any time."""
    body = json.loads(route.request.post_data or "")
    route.continue_(post_data=json.dumps(body | {"ignore_eos": True}))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The machine's Chromium, headless. The scope is a module, since the browser keeps an event loop running."""
    path = os.environ.get("HACKKV_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"NO BROWSER, THE PAGE IS NOT TESTED: none of {', '.join(NAMES)} is installed (make browser)")
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, headless=True, args=list(FLAGS))
        yield browser
        browser.close()


class Watched:
    """The messages and requests of a page during a test."""

    def __init__(self, page: Page) -> None:
        self.complaints: list[str] = []
        self.addresses: set[str] = set()
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.addresses.add(request.url))

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """See `Open`. At the end, no page may have logged an error or warning, or requested anything of another origin."""
    contexts: list[BrowserContext] = []
    watched: list[tuple[str, Watched, bool]] = []

    def begin(url: str, may_complain: bool = False, **keywords: Any) -> Page:
        keywords = {"viewport": {"width": 1280, "height": 900}, **keywords}
        contexts.append(browser.new_context(**keywords))
        contexts[-1].set_default_timeout(PATIENCE_MS)
        page = contexts[-1].new_page()
        watched.append((url, Watched(page), may_complain))
        page.goto(url)
        return page

    yield begin
    for context in contexts:
        for page in context.pages:
            page.unroute_all(behavior="wait")  # else an answer on its way would be an error of the next test
        context.close()
    for url, seen, may_complain in watched:
        assert {address for address in seen.addresses if not address.startswith(f"{url}/")} == set()
        assert may_complain or seen.complaints == []
