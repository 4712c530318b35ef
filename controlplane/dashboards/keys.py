"""The Keys pages: who may use the endpoint and REST, and how much. A key's text is shown once, in the answer that made it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, date, datetime, time
from typing import Any, NamedTuple

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils import timezone
from django.views.decorators.http import require_GET

from controlplane.access import services
from controlplane.access.actors import actor_of
from controlplane.access.expiry import parse_overlap
from controlplane.access.limits import UNLIMITED, Limits, changed, parse_limit
from controlplane.access.models import ApiKey
from controlplane.access.roles import Role
from controlplane.dashboards.asking import ask, mistyped
from controlplane.dashboards.clash import Clash, clash, seen, was_seen
from controlplane.dashboards.connect import Connect, connect
from controlplane.dashboards.looks import Look
from controlplane.dashboards.page import errors_of, is_htmx, page, posted, problems_of, signed_in
from controlplane.deployments import effects, queries
from controlplane.fleet.errors import Conflict, InvalidInput, Problems, TandemError
from controlplane.fleet.wire import Scope

_UNITS = (("requests_per_minute", "requests/min"), ("tokens_per_minute", "tokens/min"), ("concurrency", "at a time"))


_LABELS = {
    "requests_per_minute": "Requests a minute",
    "tokens_per_minute": "Tokens a minute",
    "concurrency": "Requests at a time",
    "priority": "Priority",
    "silence_seconds": "Engine's first byte, seconds",
    "gap_seconds": "Gap in a stream, seconds",
    "models": "Models",
    "expires_at": "Expires",
}
_FORMS = {"limits": Limits._fields, "edit": ("models", "expires_at")}
"""The editing forms of a key's page, and what each changes."""


class Line(NamedTuple):
    key: ApiKey
    look: Look
    role: str
    limits: list[str]
    """In words; empty: none."""
    old_until: datetime | None
    """Until when a secret from before a rotation works."""


def _line(key: ApiKey, now: datetime) -> Line:
    if key.revoked_at:
        look = Look("Revoked", "square", "off")
    elif key.expires_at and key.expires_at <= now:
        look = Look("Expired", "slashed", "off")
    else:
        look = Look("Valid", "disc", "ok")
    limits = [f"{value:,} {unit}" for field, unit in _UNITS if (value := getattr(key, field)) is not None]
    if key.priority:
        limits.append(f"priority {key.priority:+}".replace("-", "−"))
    waits = (("silence_seconds", "first byte within {:,} s"), ("gap_seconds", "gaps up to {:,} s"))
    limits += [says.format(value) for field, says in waits if (value := getattr(key, field)) is not None]
    return Line(key, look, Role(key.role).label, limits, key.old_secret_works_until())


def _table(words: str = "") -> dict[str, Any]:
    """What the table shows: the keys that hold all the words."""
    now = timezone.now()
    lines = [_line(key, now) for key in services.list_keys()]
    found = [line for line in lines if all(word in _haystack(line) for word in words.lower().split())]
    return {"lines": found, "count": len(lines), "q": words}


def _haystack(line: Line) -> str:
    key = line.key
    return " ".join((key.name, f"tdm-{key.id}", key.scope, line.look.word, key.created_by, *key.models_allowed)).lower()


@signed_in
@require_GET
def keys(request: HttpRequest) -> HttpResponse:
    """All keys, revoked and expired ones too."""
    context = {"title": "Keys", **_new_form(), **_table(request.GET.get("q", ""))}
    if request.GET.get("part") == "live":
        return page(request, "keys/list.html", context, live="keys/table.html")
    return page(request, "keys/list.html", context)


def _new_form(values: Mapping[str, str] | None = None, error: TandemError | None = None) -> dict[str, Any]:
    """The form of a new key as it was sent, and what is wrong in it."""
    problems = problems_of(error)
    elsewhere = [p for p in problems if p.field not in ("name", "models", "expires_at", *Limits._fields)]
    empty = dict.fromkeys(("name", "models", "expires", *Limits._fields), "")
    return {
        "roles": list(Role),
        "values": {**empty, **(values or {})},
        "errors": errors_of(error),
        "problems": problems,
        "elsewhere": elsewhere,
    }


@signed_in
@require_GET
def key(request: HttpRequest, key: str) -> HttpResponse:
    """One key: what it may, and what can be changed of it."""
    return _detail(request, services.get_key(key))


def _detail(
    request: HttpRequest,
    row: ApiKey,
    values: Mapping[str, str] | None = None,
    refused: InvalidInput | None = None,
    confirm_error: str = "",
    clashed: tuple[str, Clash] | None = None,
) -> HttpResponse:
    """`clashed`: the form whose fields somebody else changed meanwhile, and how."""
    stored = {field: "" if value is None else str(value) for field, value in row.limits._asdict().items()}
    stored |= {"models": ", ".join(row.models_allowed), "expires": f"{row.expires_at:%F}" if row.expires_at else ""}
    values = {**stored, **(values or {})}
    line = _line(row, timezone.now())
    context = {
        "title": row.name,
        "key": row,
        "line": line,
        "sentence": _sentence(line),
        "connect": None if line.look.tone == "off" else _connect(request, row),
        "values": values,
        "errors": errors_of(refused),
        "stops": effects.of_revocation(row),
        "confirm_error": confirm_error,
        "seen": {name: seen({field: row.editable[field] for field in fields}) for name, fields in _FORMS.items()},
        "clashed": dict([clashed]) if clashed else {},
    }
    status = 409 if clashed else 400 if refused or confirm_error else 200
    return page(request, "keys/detail.html", context, status=status)


def _change(request: HttpRequest, row: ApiKey, which: str, changes: dict[str, Any]) -> HttpResponse | None:
    """Save one of the forms of `_FORMS`; a page where somebody else changed the same fields after it was opened."""
    base = was_seen(request.POST.get("seen", ""))
    if base is not None:
        theirs = json.loads(seen({field: row.editable[field] for field in _FORMS[which]}))
        mine = json.loads(seen({**theirs, **changes}))
        if found := clash(base, theirs, mine, target=row.pk, labels=_LABELS):
            return _detail(request, row, request.POST.dict(), clashed=(which, found))
    now = {field: row.editable[field] for field in _FORMS[which]}
    services.edit_key(actor=actor_of(request), key_id=row.pk, changes=changes, seen=None if base is None else now)
    return None


def _sentence(line: Line) -> str:
    if line.key.revoked_at:
        return f"Revoked at {line.key.revoked_at:%Y-%m-%d %H:%M} UTC. It stays in the list, because logs and the audit trail name it."
    if line.look.word == "Expired":
        return "It has expired: choose a later day below, or make a new key."
    if line.key.scope == Scope.MANAGE:
        return "Opens REST and the tandem command."
    if line.key.limits._replace(priority=0) == UNLIMITED:
        return f"Opens the OpenAI endpoint, {', '.join(['without limits', *line.limits])}."
    return f"May use {', '.join(line.limits)}."


def _limits_of(form: Mapping[str, str], found: Problems) -> dict[str, int | None]:
    limits: dict[str, int | None] = {}
    for field in Limits._fields:
        if field in form:
            with found.part():
                limits[field] = parse_limit(form[field].replace("−", "-"), field)
    return limits


@signed_in
@posted
def create(request: HttpRequest) -> HttpResponse:
    """A new key; its text stands in this answer and nowhere else. What is wrong is told at the fields of the form."""
    try:
        made, text = _create(request)
    except (InvalidInput, Conflict) as error:
        context = {"title": "Keys", **_new_form(request.POST.dict(), error)}
        if is_htmx(request):
            return page(request, "keys/new.html", context, status=error.status)
        return page(request, "keys/list.html", {**context, **_table()}, status=error.status)
    answer = _shown(request, "New key", made, text, {**_new_form(), **_table()} if is_htmx(request) else {})
    answer.headers["HX-Retarget"], answer.headers["HX-Reswap"] = "#created", "innerHTML"
    return answer


def _create(request: HttpRequest) -> tuple[ApiKey, str]:
    form = request.POST
    scope = form.get("scope", "")
    inference = scope == Scope.INFERENCE
    found = Problems()
    day, role = None, None
    with found.part():
        day = _day(form.get("expires", ""))
    if scope == Scope.MANAGE:
        try:
            role = Role[form.get("role", "viewer").upper()]
        except KeyError:
            found.add("choose viewer, operator or admin", "role")
    limits = _limits_of(form.dict(), found) if inference else {}
    wanted: dict[str, Any] = {
        "name": form.get("name", "").strip(),
        "scope": scope,
        "role": role,
        "models": _names(form.get("models", "")) if inference else [],
        "expires_at": datetime.combine(day, time.max, UTC) if day else None,
        "limits": Limits(**limits),  # type: ignore[arg-type]  # an empty priority is the usual one
    }
    with found.part():
        services.check_key(**wanted)
    found.raise_any()
    return services.create_key(actor=actor_of(request), token=form.get("once", ""), **wanted)


def _connect(request: HttpRequest, key: ApiKey) -> Connect | None:
    """How to use the key; None: not at the OpenAI endpoint."""
    if key.scope != Scope.INFERENCE:
        return None
    known = list(queries.served_names().values())
    allowed = [name for name in known if name in key.models_allowed] or [*key.models_allowed, *known]
    return connect(request, next(iter(allowed), ""))


def _shown(request: HttpRequest, title: str, row: ApiKey, text: str, more: Mapping[str, Any]) -> HttpResponse:
    template = "keys/created.html" if is_htmx(request) else "keys/created_page.html"
    answer = page(
        request, template, {"title": title, "key": row, "text": text, "connect": _connect(request, row), **more}
    )
    answer.headers["Cache-Control"] = "no-store"
    return answer


@signed_in
@posted
def edit(request: HttpRequest, key: str) -> HttpResponse:
    """Set a key's models and the day of its end; no model named: all, no day: never."""
    form, row = request.POST.dict(), services.get_key(key)
    try:
        day = _day(form.get("expires", ""))
        same = row.expires_at is not None and day == row.expires_at.date()  # its hour stays too
        expires_at = row.expires_at if same else datetime.combine(day, time.max, UTC) if day else None
        changes: dict[str, Any] = {"expires_at": expires_at}
        if row.scope == Scope.INFERENCE:
            changes["models"] = sorted(set(_names(form.get("models", ""))))
        if clashed := _change(request, row, "edit", changes):
            return clashed
    except InvalidInput as error:
        return _detail(request, row, form, error)
    messages.success(request, f"{row.name} is changed. Routers follow within seconds.", extra_tags="link")
    return redirect("key", key)


def _day(text: str) -> date | None:
    try:
        return datetime.strptime(text, "%Y-%m-%d").date() if text else None
    except ValueError:
        raise InvalidInput("expires_at: write a day as YYYY-MM-DD", field="expires_at") from None


def _names(text: str) -> list[str]:
    return text.replace(",", " ").split()


@signed_in
@posted
def limit(request: HttpRequest, key: str) -> HttpResponse:
    """Set a key's limits; an empty field takes a limit away."""
    form, row = request.POST.dict(), services.get_key(key)
    found = Problems()
    try:
        limits = _limits_of(form, found)
        with found.part():
            limits = dict(changed(row.limits, limits)._asdict())
        found.raise_any()
        if clashed := _change(request, row, "limits", limits):
            return clashed
    except InvalidInput as error:
        return _detail(request, row, form, error)
    messages.success(request, f"The limits of {row.name} are saved. Routers follow within seconds.", extra_tags="link")
    return redirect("key", key)


@signed_in
@posted
def rotate(request: HttpRequest, key: str) -> HttpResponse:
    """A new secret for the key; its text stands in this answer and nowhere else."""
    overlap = parse_overlap(request.POST.get("overlap", "24h"))
    if not overlap and "confirmed" not in request.POST:
        name = services.get_key(key).name
        said = f"The old secret of {name} ends at once: its clients are refused until they have the new one."
        return ask(
            request, title="End the old secret now?", sentence=said, button="Make a new secret", target="#rotated"
        )
    row, text = services.rotate_key(
        actor=actor_of(request), key_id=key, overlap_seconds=overlap, token=request.POST.get("once", "")
    )
    old_until = services.get_key(row.id).old_secret_works_until() if overlap else None
    return _shown(request, "New secret", row, text, {"rotated": True, "old_until": old_until})


@signed_in
@posted
def revoke(request: HttpRequest, key: str) -> HttpResponse:
    """End a key for ever, after its name was typed."""
    row = services.get_key(key)
    if request.POST.get("name", "").strip() != row.name:
        return _detail(request, row, confirm_error=mistyped(row.name, "revoke"))
    revoked = services.revoke_key(actor=actor_of(request), key_id=key)
    messages.success(
        request, f"The key {revoked.name} is revoked. Routers refuse it within seconds.", extra_tags="link"
    )
    return redirect("keys")
