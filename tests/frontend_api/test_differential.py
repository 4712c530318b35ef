"""A request through the router gives the bytes that the engine itself gives: ids and times aside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.frontend_api import differential as d


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=30) as client:
        yield client


ASKED = {
    f"{name}{', streamed' if stream else ''}": (path, body | ({"stream": True} if stream else {}))
    for name, (path, body) in (d.ANSWERED | d.WITH_TOOLS).items()
    for stream in (False, True)
} | d.STREAMS


@pytest.mark.parametrize("name", ASKED)
def test_answers(client: httpx.Client, urls: dict[str, str], name: str) -> None:
    path, body = ASKED[name]
    d.ask(client, urls["aggregated"], path, body, "before")  # from here on its KV is there: counts are equal
    direct = d.ask(client, urls["aggregated"], path, body, "same")
    assert direct.status == 200, direct
    assert d.ask(client, urls["alone"], path, body, "same") == direct
    disaggregated = d.ask(client, urls["pair"], path, body, "same")
    assert (disaggregated.status, disaggregated.kind) == (direct.status, direct.kind)
    assert d.words(disaggregated) == d.words(direct)


@pytest.mark.parametrize("name", d.REFUSED)
def test_refusals(client: httpx.Client, urls: dict[str, str], name: str) -> None:
    path, body = d.REFUSED[name]
    direct = d.ask(client, urls["aggregated"], path, body, "same")
    assert 400 <= direct.status < 500, direct
    expected = d.in_the_endpoints_shape(path, direct)
    assert d.ask(client, urls["alone"], path, body, "same") == expected
    assert d.ask(client, urls["pair"], path, body, "same") == expected


@pytest.mark.parametrize("name", d.BROKEN)
@pytest.mark.parametrize("path", [d.CHAT, d.MESSAGES])
def test_bodies_that_are_no_request(client: httpx.Client, urls: dict[str, str], name: str, path: str) -> None:
    direct = d.ask(client, urls["aggregated"], path, d.BROKEN[name], "same")
    through = d.ask(client, urls["alone"], path, d.BROKEN[name], "same")
    assert (through.status, through.kind) == (direct.status, direct.kind) == (400, "application/json")
    error: dict[str, Any] = httpx.Response(400, content=through.body).json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
