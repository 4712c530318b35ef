"""The browser over a whole running Tandem: engines that really start and end, seen live."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import sign_in
from tests.flows.site import Site


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """In place of the web process alone: everything, with one node on stand-in engines."""
    site = Site(tmp_path_factory.mktemp("site"))
    try:
        site.up()
        yield site
    finally:
        site.down()


def test_sign_in_see_both_engines_ready_and_scale_decode(page: Page, web: Site) -> None:
    password = web.manage("createadmin").split()[-1]
    web.deploy(prefill=1, decode=1)
    prefill, decode = (web.engines(role=role)[0]["id"] for role in ("prefill", "decode"))

    sign_in(page, "admin", password)
    page.get_by_role("link", name="Deployments").click()
    page.get_by_role("link", name="demo").click()
    for engine in (prefill, decode):
        expect(page.locator(f"#card-{engine}[data-state=ready]")).to_be_visible()
    expect(page.locator("#live-state[data-state=live]")).to_be_visible()

    page.locator("#more-decode").click()
    expect(page.locator("[id^=card-demo-decode-][data-state=ready]")).to_have_count(2)
    assert web.ready(prefill=1, decode=2)

    page.locator("#less-decode").click()
    expect(page.locator("[id^=card-demo-decode-]")).to_have_count(1)
    expect(page.locator(f"#card-{prefill}[data-state=ready]")).to_be_visible()
    assert web.ready(prefill=1, decode=1)
    assert web.ask()[0] == 200
