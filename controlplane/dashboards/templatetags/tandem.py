"""The small marks of every page: state shapes, icons, ages, quantities, meters. Markup only, no decisions."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from django import template
from django.template import Context
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe

from controlplane.dashboards import cards, words
from controlplane.dashboards.figures import Proof
from controlplane.dashboards.looks import Look
from controlplane.dashboards.words import Quantity
from controlplane.fleet.model import Runtime
from controlplane.fleet.plural import plural as counted

register = template.Library()

UNKNOWN = SafeString('<span class="unknown">unknown</span>')
_RING = '<circle cx="6" cy="6" r="4.9" fill="none" stroke="currentColor" stroke-width="1.5"/>'


def _pie(large: int, x: float, y: float) -> str:
    return _RING + f'<path d="M6 6V1.1A4.9 4.9 0 {large} 1 {x} {y}Z" fill="currentColor"/>'


SHAPES: dict[str, str] = {
    "disc": '<circle cx="6" cy="6" r="5" fill="currentColor"/>',
    "dashed": '<circle cx="6" cy="6" r="4.9" fill="none" stroke="currentColor" stroke-width="1.6" stroke-dasharray="2.2 1.65"/>',
    "fifth": _pie(0, 10.66, 4.49),
    "quarter": _pie(0, 10.9, 6),
    "third": _pie(0, 10.24, 8.45),
    "half": _pie(0, 6, 10.9),
    "most": _pie(1, 1.1, 6),
    "lower": _RING + '<path d="M1.1 6a4.9 4.9 0 0 0 9.8 0Z" fill="currentColor"/>',
    "triangle": '<path d="M6 .9 11.4 10.9H.6Z" fill="currentColor"/>',
    "slashed": _RING + '<path d="M2.6 9.4 9.4 2.6" stroke="currentColor" stroke-width="1.6"/>',
    "cross": '<path d="M2 2 10 10M10 2 2 10" stroke="currentColor" stroke-width="2.5" stroke-linecap="round"/>',
    "square": '<rect x="1.6" y="1.6" width="8.8" height="8.8" rx="1.8" fill="currentColor"/>',
    "frame": '<rect x="1.6" y="1.6" width="8.8" height="8.8" rx="1.8" fill="none" stroke="currentColor" stroke-width="1.6"/>',
}

ICONS: dict[str, str] = {
    "fleet": '<circle cx="8" cy="8" r="6.2"/><circle cx="8" cy="8" r="2.2" fill="currentColor" stroke="none"/>',
    "deployments": '<rect x="1.8" y="2.6" width="5" height="10.8" rx="1.6"/><rect x="9.2" y="2.6" width="5" height="10.8" rx="1.6"/><path d="M6.8 8h2.4"/>',
    "nodes": '<rect x="2" y="2.4" width="12" height="4.6" rx="1.4"/><rect x="2" y="9" width="12" height="4.6" rx="1.4"/><path d="M4.6 4.7h.01M4.6 11.3h.01"/>',
    "keys": '<circle cx="5" cy="10.8" r="3"/><path d="m7.2 8.6 6-6M11 4.8l1.9 1.9"/>',
    "users": '<circle cx="8" cy="5.2" r="2.9"/><path d="M2.6 13.6a5.4 5.4 0 0 1 10.8 0"/>',
    "help": '<circle cx="8" cy="8" r="6.2"/><path d="M6.2 6.3a1.9 1.9 0 1 1 2.6 1.8c-.5.2-.8.6-.8 1.1v.2M8 11.4h.01"/>',
    "theme": '<circle cx="8" cy="8" r="5.8"/><path d="M8 2.2a5.8 5.8 0 0 1 0 11.6Z" fill="currentColor" stroke="none"/>',
    "leave": '<path d="M6.4 2.6H3.8a1 1 0 0 0-1 1v8.8a1 1 0 0 0 1 1h2.6M10 5l3.2 3L10 11M13 8H6.4"/>',
    "plus": '<path d="M8 3.2v9.6M3.2 8h9.6"/>',
    "arrow": '<path d="m3 10 5-5 5 5" stroke-width="2"/>',
}


@register.simple_tag
def once() -> SafeString:
    """The field that makes a form that was sent twice be done once."""
    return format_html('<input type="hidden" name="once" value="{}">', secrets.token_urlsafe(18))


@register.simple_tag
def shape(look: Look, size: str = "") -> SafeString:
    """The state's shape in its tone. Its word must stand beside it, so it is hidden from screen readers."""
    classes = f"shape tone-{look.tone} {size}{' turning' if look.moving else ''}".strip()
    return format_html(
        '<svg class="{}" viewBox="0 0 12 12" aria-hidden="true">{}</svg>',
        classes,
        mark_safe(SHAPES[look.shape]),  # noqa: S308
    )


@register.simple_tag
def icon(name: str, classes: str = "") -> SafeString:
    """A line icon, hidden from screen readers."""
    return format_html(
        '<svg class="{}" viewBox="0 0 16 16" fill="none" stroke="currentColor" stroke-width="1.5" stroke-linecap="round" '
        'stroke-linejoin="round" aria-hidden="true">{}</svg>',
        classes,
        mark_safe(ICONS[name]),  # noqa: S308
    )


@register.simple_tag
def age(since: datetime | None) -> SafeString:
    """How long ago, going on in the browser; the exact time on hover."""
    if since is None:
        return UNKNOWN
    seconds = (timezone.now() - since).total_seconds()
    return format_html(
        '<time datetime="{}" title="{} UTC" data-age="{}">{}</time>',
        since.isoformat(),
        f"{since:%F %T}",
        f"{seconds:.1f}",
        words.age(seconds),
    )


@register.simple_tag
def countdown(at: datetime, before: str, over: str) -> SafeString:
    """`before` and the time left, going on in the browser by its own clock; `over` when none is left."""
    seconds = (at - timezone.now()).total_seconds()
    return format_html(
        '<time datetime="{}" title="{} UTC" data-left="{}" data-before="{}" data-over="{}">{}</time>',
        at.isoformat(),
        f"{at:%F %T}",
        f"{max(seconds, 0):.1f}",
        before,
        over,
        f"{before} {words.left(seconds)}." if seconds > 0 else over,
    )


@register.simple_tag
def clock(at: datetime) -> SafeString:
    """The time of day, in the reader's zone once the browser has it; UTC until then."""
    return format_html(
        '<time datetime="{}" title="{} UTC" data-clock>{} UTC</time>', at.isoformat(), f"{at:%F %T}", f"{at:%R}"
    )


@register.simple_tag
def quantity(value: Quantity) -> SafeString:
    """A number and its unit; unknown is a word in a quiet colour."""
    if value == words.UNKNOWN:
        return UNKNOWN
    if not value.unit:
        return format_html("{}", value.value)
    return format_html('{}<span class="unit">{}{}</span>', value.value, "" if value.unit == "%" else " ", value.unit)


@register.simple_tag
def meter(fraction: float | None, classes: str = "") -> SafeString:
    """A bar filled to a share of 0..1. The number itself must stand beside it."""
    if fraction is None:
        return SafeString("")
    filled = f"{100 * min(max(fraction, 0.0), 1.0):.1f}"
    return format_html(
        '<svg class="meter {}" viewBox="0 0 100 4" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="track" width="100" height="4"/><rect class="fill" width="{}" height="4"/></svg>',
        classes,
        filled,
    )


@register.filter
def plural(number: int, noun: str) -> str:
    """`2|plural:"engine"` → 2 engines; `2|plural:"process,processes"` → 2 processes."""
    return counted(number, *noun.split(","))


@register.filter
def shown(value: Any) -> str:
    """A value of a document in one line; None: its default."""
    if value is None:
        return "default"
    return ", ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)


@register.filter
def without(message: str, name: str) -> str:
    """A message without the name that already stands before it: `smollm2: x` → `x`."""
    return message.removeprefix(f"{name}: ")


@register.filter
def memory(number: float | None) -> str:
    """Bytes in GiB."""
    return str(words.memory(number))


@register.filter
def ending(exit_code: int) -> str:
    """`exit code 1`, `signal 9`."""
    return cards.ending(exit_code)


@register.filter
def runtimes(names: Iterable[str]) -> str:
    """`gpu, cpu, sim (stand-ins)`."""
    return ", ".join("sim (stand-ins)" if name == Runtime.SIM else name for name in names)


@register.simple_tag
def mark(name: str, tone: str) -> SafeString:
    """A shape by its own name."""
    return shape(Look("", name, tone))


PROOFS = {
    Proof.WORKED: Look("worked", "disc", "ok"),
    Proof.FAILED: Look("failed", "cross", "bad"),
    Proof.UNTRIED: Look("not tried yet", "dashed", "wait"),
}


@register.simple_tag
def proof(found: Proof) -> SafeString:
    """A pair's newest proof: shape and word."""
    return format_html("{} {}", shape(PROOFS[found]), PROOFS[found].word)


def _field(context: Context, name: str, label: str, help: str, **more: Any) -> dict[str, Any]:
    values: dict[str, str] = context["values"]
    errors: dict[str, str] = context["errors"]
    return {
        "name": name,
        "label": label,
        "help": help,
        "value": values.get(name, ""),
        "error": errors.get(name),
        **more,
    }


@register.inclusion_tag("parts/field.html", takes_context=True)
def field(
    context: Context,
    name: str,
    label: str,
    help: str = "",
    kind: str = "text",
    placeholder: str = "",
    mono: bool = False,
    autofocus: bool = False,
    options: str = "",
) -> dict[str, Any]:
    """A text field of the deployment form with its value, help and error. `options`: suggestions, by spaces."""
    return _field(
        context, name, label, help,
        placeholder=placeholder, mono=mono, autofocus=autofocus and not context["errors"], numeric=kind == "number", options=options.split(),
    )  # fmt: skip


@register.inclusion_tag("parts/field.html", takes_context=True)
def select(context: Context, name: str, label: str, choices: str, help: str = "") -> dict[str, Any]:
    """A choice of words."""
    return _field(context, name, label, help, choices=choices.split())


@register.inclusion_tag("parts/field.html", takes_context=True)
def pool_field(
    context: Context,
    role: str,
    key: str,
    label: str,
    help: str = "",
    stepper: bool = False,
    low: int = 0,
    mono: bool = False,
    wide: bool = False,
) -> dict[str, Any]:
    """A field of one pool."""
    name = f"pools.{role}.{key}"
    return _field(context, name, label, help, stepper=stepper, low=low, mono=mono, wide=wide, numeric=not mono)


@register.filter
def has_routing(errors: Mapping[str, str]) -> bool:
    """Whether something is wrong in the routing policy."""
    return any(field.startswith("routing.") for field in errors)


ADVANCED = ("memory_fraction", "kv_cache_bytes", "max_num_batched_tokens", "extra_args")


@register.filter
def has_advanced(fields: Mapping[str, str], role: str) -> bool:
    """Whether one of a pool's folded fields holds something: a value or an error."""
    return any(fields.get(f"pools.{role}.{key}") for key in ADVANCED)
