"""axe finds nothing on any page, in both themes and on a narrow screen: contrast, names, headings, lists, roles."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from django.urls import URLPattern
from playwright.sync_api import Page

from controlplane.dashboards.urls import urlpatterns
from tests.browser.conftest import sign_in
from tests.browser.web import Web
from tests.controlplane.pages.test_every_page import READS

AXE = (Path(__file__).parent / "vendor" / "axe.min.js").read_text()
PAGES = READS - {"foot", "deployment-logs-more", "deployment-logs-download", "deployment-export"} | {"deployments-new"}
"""Not parts of pages and files. A new page is looked at too: `READS` must name it."""
LOOKS: tuple[tuple[Literal["light", "dark"], int], ...] = (("light", 1280), ("dark", 390))
FINDINGS = """axe.run(document, { resultTypes: ["violations"] }).then(({ violations }) =>
  violations.flatMap(({ id, nodes }) => nodes.map(({ target, any }) => `${id}: ${target}: ${any[0]?.message ?? ""}`)))"""


@pytest.fixture(scope="module")
def paths(web: Web) -> list[str]:
    """Every page of a fleet that has everything: engines in every state, failed pairs, foreign processes, silent nodes."""
    key = web.django(
        "seed.fleet()\nfrom controlplane.access import services\nfrom controlplane.access.roles import SYSTEM\n"
        "print(services.create_key(actor=SYSTEM, name='app', scope='inference')[0].id)"
    )
    values = {
        "help": ("guide", "architecture"),
        "deployment": ("support-chat", "long-context"),
        "node": ("gpu-b",),
        "key": (key,),
    }
    found = []
    for pattern in urlpatterns:
        assert isinstance(pattern, URLPattern)
        if pattern.name not in PAGES:
            continue
        before, _, rest = f"/{pattern.pattern}".partition("<")
        names = values[str(pattern.name).split("-")[0]] if rest else ("",)
        found += [before + name + rest.partition(">")[2] for name in names]
    return found


def _findings(page: Page, where: str) -> list[str]:
    found: list[str] = page.evaluate(FINDINGS)
    return [f"{page.url}, {where}: {finding}" for finding in found]


def _looked_at(page: Page, paths: list[str]) -> list[str]:
    found = []
    for path in paths:
        for theme, width in LOOKS:
            page.emulate_media(color_scheme=theme)
            page.set_viewport_size({"width": width, "height": 900})
            page.goto(path)
            page.evaluate(AXE)
            found += _findings(page, f"{theme}, {width} wide")
    return found


def test_axe_finds_nothing_while_there_is_nothing_yet(page: Page, web: Web) -> None:
    sign_in(page, "operator")
    assert _looked_at(page, ["/", "/deployments/", "/nodes/", "/keys/"]) == []


def test_axe_finds_nothing_on_any_page(page: Page, paths: list[str]) -> None:
    found = []
    page.goto("/login/")
    page.evaluate(AXE)
    found += _findings(page, "nobody signed in")
    sign_in(page, "admin")
    found += _looked_at(page, paths)
    assert found == []
