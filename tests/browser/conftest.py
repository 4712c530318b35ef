"""A real web process and a real browser. Every page must leave the console free of errors: CSP violations are such."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from tests.browser.web import PASSWORD, Web
from tests.conftest import RedisServer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE = 20_000.0
"""Milliseconds for a condition to come true on a busy machine."""
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer) -> Iterator[Web]:
    """A site with one user per role and no rows yet."""
    site = Web(tmp_path_factory.mktemp("web"), redis_server)
    try:
        site.start()
        yield site
    finally:
        site.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium. Closed with its module: Playwright's loop must not meet other tests' loops."""
    if CHROMIUM is None:
        pytest.fail("no Chromium on this machine: run `apt-get install chromium`")
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


class Console:
    """What a page said on its console, and the errors it threw."""

    def __init__(self, page: Page) -> None:
        self.errors: list[str] = []
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def _said(self, message: ConsoleMessage) -> None:
        refused = "Failed to load resource: the server responded with a status of 4"
        if message.type in ("error", "warning") and not message.text.startswith(refused):
            self.errors.append(message.text)


@pytest.fixture
def page(browser: Browser, web: Web, tmp_path: Path) -> Iterator[Page]:
    """A fresh browser profile on the site, not signed in. Fails its test when the console saw an error."""
    context = browser.new_context(base_url=web.url, viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    opened = context.new_page()
    opened.set_default_timeout(PATIENCE)
    console = Console(opened)
    yield opened
    context.close()
    assert console.errors == []


def sign_in(page: Page, name: str, password: str = PASSWORD) -> None:
    """Through the login page, as a person does."""
    page.goto("/login/")
    page.get_by_label("Name").fill(name)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Sign in").click()
