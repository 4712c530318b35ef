"""Which calls go through a proxy: https to public hosts alone, whatever the environment says of others."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from controlplane.fleet.errors import InvalidInput
from controlplane.fleet.outbound import is_local, proxy_for, with_no_proxy

PROXY = "http://proxy.example.com:3128"
EVERY = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"), PROXY)


@pytest.mark.parametrize(
    "exceptions", [{}, {"NO_PROXY": "localhost,127.0.0.0/8"}, {"no_proxy": "fd00::/8,nonsense/99"}]
)
@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.8.8.8", "localhost", "tandem.localhost", "[::1]", "0.0.0.0", "10.1.2.3", "172.20.0.1", "192.168.7.7",
        "169.254.169.254", "100.100.1.1", "[fd00::5]", "[fe80::1]", "[::ffff:10.0.0.1]", "gpu7", "gpu7.local", "tandem.internal",
        "nas.lan", "x.home.arpa",
    ],
)  # fmt: skip
def test_nothing_local_goes_through_a_proxy(host: str, exceptions: dict[str, str]) -> None:
    for scheme in ("http", "https"):
        assert proxy_for(f"{scheme}://{host}:8000", EVERY | exceptions) is None


def test_a_name_that_resolves_to_private_addresses_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (address, 0)) for address in found])
    for found[:], local in (["10.0.0.1", "fd00::1"], True), (["10.0.0.1", "1.1.1.1"], False), (["1.1.1.1"], False):
        assert is_local("tandem.example.com") is local

    def none(*_: object, **__: object) -> None:
        raise OSError

    monkeypatch.setattr("socket.getaddrinfo", none)
    assert not is_local("tandem.example.com"), "behind some proxies no public name resolves"


@pytest.mark.parametrize(
    ("environ", "url", "proxy"),
    [
        (EVERY, "https://1.1.1.1", PROXY),
        (EVERY, "http://1.1.1.1", None),  # the proxy would read the key
        ({"HTTP_PROXY": PROXY}, "https://1.1.1.1", None),
        ({"ALL_PROXY": PROXY}, "https://1.1.1.1", PROXY),
        ({"HTTPS_PROXY": "proxy:3128"}, "https://1.1.1.1", "http://proxy:3128"),
        (EVERY | {"NO_PROXY": "*"}, "https://1.1.1.1", None),
        (EVERY | {"NO_PROXY": "1.1.1.0/24"}, "https://1.1.1.1", None),
        (EVERY | {"NO_PROXY": "1.2.0.0/16, fd00::/8"}, "https://1.1.1.1", PROXY),
        (EVERY | {"no_proxy": ".example.com"}, "https://tandem.example.com", None),
        ({}, "https://1.1.1.1", None),
    ],
)
def test_https_to_a_public_host_may(
    environ: dict[str, str], url: str, proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: [(0, 0, 0, "", ("1.1.1.1", 0))])
    assert proxy_for(url, environ) == proxy
    httpx.HTTPTransport(proxy=proxy_for(url, environ)).close()


@pytest.mark.parametrize(
    "text", ["socks5://h:1", "http://", "http://:3128", "http://h:x", "http://[h", "ht tp://h", "h\u00e9:1"]
)
@pytest.mark.parametrize("name", ["HTTPS_PROXY", "all_proxy"])
def test_a_proxy_that_is_none_is_a_sentence_without_its_password(name: str, text: str) -> None:
    with pytest.raises(InvalidInput, match=f"{name}: write an HTTP proxy's URL"):
        proxy_for("https://1.1.1.1", {name: text})
    assert proxy_for("http://127.0.0.1:8000", {name: text}) is None, "nobody is kept from this machine by it"
    with pytest.raises(InvalidInput) as refused:
        proxy_for("https://1.1.1.1", {name: "socks5://me:hush@h"})
    assert "hush" not in refused.value.message


def test_certificates_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").touch()
    for file in ("nowhere.pem", "empty.pem"):
        with pytest.raises(InvalidInput, match="SSL_CERT_FILE: "):
            proxy_for("https://1.1.1.1", {"SSL_CERT_FILE": str(tmp_path / file)})


def test_programs_of_others_are_told_what_is_local() -> None:
    given = with_no_proxy({"NO_PROXY": "example.com, localhost"})
    assert given["NO_PROXY"] == given["no_proxy"]
    assert given["NO_PROXY"].split(",")[:3] == ["example.com", "localhost", "127.0.0.1"]
    assert {"10.0.0.0/8", "::1"} <= set(given["NO_PROXY"].split(","))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (EVERY | given).items():
            patch.setenv(name, value)
        httpx.Client().close()  # a client that ends on NO_PROXY would end here
