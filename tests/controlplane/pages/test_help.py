"""The documentation in the dashboard: every link in it leads somewhere, and every page's Help link leads to its section."""

from __future__ import annotations

import re

import pytest

from controlplane.dashboards import help, page
from controlplane.fleet.errors import NotFound
from tests.controlplane.pages.test_every_page import signed_in


@pytest.mark.parametrize("topic", help.FILES)
def test_every_link_between_the_files_leads_to_a_section(topic: str) -> None:
    document = help.read(topic)
    assert "&lt;!--" not in document.html
    for href in re.findall(r'href="([^"]+)"', document.html):
        if href.startswith(("https://", "http://")):
            continue
        path, _, anchor = href.partition("#")
        found = re.fullmatch(r"/help/(\w+)/", path)
        assert found or not path, href
        target = help.read(found[1]) if found else document
        assert not anchor or anchor in target.anchors, href


def test_every_page_knows_its_section() -> None:
    for topic, anchor in page.HELP.values():
        assert anchor in help.read(topic).anchors


def test_what_is_not_there_is_said() -> None:
    with pytest.raises(NotFound):
        help.read("nonsense")


@pytest.mark.django_db
def test_the_page_shows_text_code_tables_and_the_picture_and_runs_nothing() -> None:
    client = signed_in("viewer")
    shown = client.get("/help/guide/").text
    assert 'id="gpu-nodes"' in shown
    assert 'src="/static/img/deployment.png"' in shown
    assert "<script>" not in shown
    assert 'href="/help/guide/#keys"' in client.get("/keys/").text
    assert client.get("/help/secrets/").status_code == 404
