"""What the pages are made of: token contrast, vendored files, no name of another host, templates without inline parts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
STATIC, TEMPLATES = ROOT / "static", ROOT / "templates"
TEXT_TOKENS = ("ink", "soft", "faint", "prefill", "decode", "link", "warn", "bad", "accent")
_TOKEN = re.compile(r"--([a-z]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)")
TOKENS = {name: (light, dark) for name, light, dark in _TOKEN.findall((STATIC / "css/tokens.css").read_text())}


def luminance(colour: str) -> float:
    """Relative luminance, WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("surface", ["ground", "panel"])
@pytest.mark.parametrize("token", TEXT_TOKENS)
def test_text_is_readable_on_every_surface(token: str, surface: str, theme: int) -> None:
    assert contrast(TOKENS[token][theme], TOKENS[surface][theme]) >= 4.5


def test_colours_live_in_the_tokens_alone() -> None:
    for sheet in (STATIC / "css").glob("*.css"):
        if sheet.name != "tokens.css":
            assert not re.search(r"#[0-9a-fA-F]{3,8}\b(?!-)", sheet.read_text()), sheet.name


def test_the_vendored_files_have_their_version_and_licence() -> None:
    table = (STATIC / "vendor/README.md").read_text()
    version = re.search(r"`htmx\.org` \| ([\d.]+)", table)
    assert version is not None
    assert f'"{version[1]}"' in (STATIC / "vendor/htmx.min.js").read_text()
    for file in (STATIC / "vendor").rglob("*"):
        if file.is_file() and file.name != "README.md":
            assert file.name in table, file.name


def test_nothing_comes_from_another_host() -> None:
    ours = [*TEMPLATES.rglob("*.html"), *(STATIC / "css").glob("*"), *(STATIC / "js").glob("*")]
    for file in ours:
        assert not re.search(r"https?://(?!www\.w3\.org/)", file.read_text()), file


def test_templates_hold_no_inline_script_or_style() -> None:
    for file in TEMPLATES.rglob("*.html"):
        text = file.read_text()
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|hx-on|<script(?![^>]*\ssrc=)|js:", text), file


def test_every_motion_stops_for_those_who_ask() -> None:
    assert "prefers-reduced-motion: reduce" in (STATIC / "css/base.css").read_text()
