"""The join command names an address that other machines reach, or says what to set."""

from __future__ import annotations

import pytest

from controlplane.fleet.config import Config
from controlplane.nodes import joining

OWN = ["10.0.0.7", "192.168.1.7"]
REDIS = "redis://:p@redis.example.com:6379/0"


@pytest.mark.parametrize(
    ("settings", "asked_at", "url"),
    [
        (Config(bind="10.0.0.7"), "127.0.0.1", "http://10.0.0.7:8000"),
        (Config(bind="fd00::7", web_port=81), "", "http://[fd00::7]:81"),
        (Config(bind="0.0.0.0"), "127.0.0.1", "http://10.0.0.7:8000"),
        (Config(bind="0.0.0.0"), "localhost", "http://10.0.0.7:8000"),
        (Config(bind="0.0.0.0"), "192.168.1.7", "http://192.168.1.7:8000"),
        (Config(bind="::"), "head.lan", "http://head.lan:8000"),
        (Config(bind="0.0.0.0", public_url="https://t.example.com"), "t.example.com", "http://10.0.0.7:8000"),
        (Config(public_url="https://t.example.com", redis_url=REDIS), "t.example.com", "https://t.example.com"),
    ],
)
def test_an_address_that_others_reach(settings: Config, asked_at: str, url: str) -> None:
    assert joining.of(settings, asked_at, OWN) == (url, "")


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        (Config(), "http://127.0.0.1:8000"),
        (Config(bind="::1"), "http://[::1]:8000"),
        (Config(public_url="https://t.example.com"), "https://t.example.com"),
        (Config(public_url="https://t.example.com", redis_url="redis://:p@127.0.0.1:17001/0"), "https://t.example.com"),
    ],
)
def test_one_that_others_do_not_reach_says_what_to_set(settings: Config, url: str) -> None:
    found = joining.of(settings, "localhost", OWN)
    assert found.url == url
    assert found.note.startswith("Only this machine reaches ")
    assert "for example TANDEM_BIND=10.0.0.7." in found.note


def test_a_machine_without_a_private_address() -> None:
    found = joining.of(Config(bind="0.0.0.0"), "", [])
    assert found.url == "http://127.0.0.1:8000"
    assert "TANDEM_BIND=10.0.0.5" in found.note


def test_this_machines_private_addresses_are_no_loopback() -> None:
    assert not [a for a in joining.private_addresses() if a.startswith(("127.", "169.254."))]
