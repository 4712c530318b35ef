"""The documentation of this very version, from the files of the checkout: read in the dashboard, without a network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.templatetags.static import static
from django.urls import reverse
from django.utils.safestring import SafeString, mark_safe
from django.views.decorators.http import require_GET
from markdown_it import MarkdownIt
from markdown_it.token import Token

from controlplane.dashboards.page import page, signed_in
from controlplane.fleet.errors import NotFound

FILES: Final = {"guide": "README.md", "architecture": "ARCHITECTURE.md", "changes": "CHANGELOG.md"}
TITLES: Final = {"guide": "Guide", "architecture": "Architecture", "changes": "What changed"}
_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)


class Section(NamedTuple):
    anchor: str
    title: str


class Document(NamedTuple):
    html: SafeString
    sections: tuple[Section, ...]
    anchors: frozenset[str]


def read(topic: str) -> Document:
    """Raises `NotFound`."""
    if topic not in FILES:
        raise NotFound("there is no such help page")
    path = Path(settings.BASE_DIR) / FILES[topic]
    try:
        return _read(path, path.stat().st_mtime_ns)
    except OSError:
        raise NotFound(f"{path.name} is not beside the installed code") from None


@lru_cache(maxsize=8)
def _read(path: Path, changed: int) -> Document:
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(_COMMENT.sub("", path.read_text(encoding="utf-8")))
    sections, anchors = [], set()
    for i, token in enumerate(tokens):
        if token.type == "heading_open":
            anchor = slug(tokens[i + 1].content)
            token.attrSet("id", anchor)
            anchors.add(anchor)
            if token.tag == "h2":
                sections.append(Section(anchor, tokens[i + 1].content))
        if token.type == "th_open" and not tokens[i + 1].content:
            token.tag = tokens[i + 2].tag = "td"  # a column without a title has no heading
        for child in token.children or ():
            _lead_here(child)
    html = markdown.renderer.render(_scrollable(tokens), markdown.options, {})
    return Document(mark_safe(html), tuple(sections), frozenset(anchors))  # noqa: S308  (our own files, HTML in them off)


def slug(heading: str) -> str:
    """The anchor of a heading, as links in the files write it: `Why it went there` → `why-it-went-there`."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _lead_here(token: Token) -> None:
    """Links between the files become links between their pages; pictures are served from here."""
    if token.type == "image":
        token.attrSet("src", static(str(token.attrGet("src")).removeprefix("static/")))
    elif token.type == "link_open":
        file, mark, anchor = str(token.attrGet("href")).partition("#")
        topic = next((topic for topic, name in FILES.items() if name == file), None)
        if topic:
            token.attrSet("href", reverse("help", args=[topic]) + mark + anchor)


def _scrollable(tokens: Sequence[Token]) -> list[Token]:
    """Wide code and tables scroll by themselves, also from the keyboard."""
    found: list[Token] = []
    for token in tokens:
        if token.type == "table_open":
            found.append(_html('<div class="table-wrap" tabindex="0">'))
        if token.type == "fence":
            text = token.content.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
            token = _html(f'<pre class="code" tabindex="0">{text}</pre>\n')
        found.append(token)
        if token.type == "table_close":
            found.append(_html("</div>"))
    return found


def _html(text: str) -> Token:
    return Token("html_block", "", 0, content=text)


@signed_in
@require_GET
def help(request: HttpRequest, topic: str) -> HttpResponse:
    """One file as a page, with its sections beside it."""
    context: dict[str, Any] = {
        "title": TITLES.get(topic, ""),
        "topic": topic,
        "document": read(topic),
        "topics": TITLES.items(),
    }
    return page(request, "help.html", context)
