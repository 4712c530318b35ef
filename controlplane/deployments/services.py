"""Everything that people change about deployments: the only writer of Deployment and Revision. Engines follow by the loop.

A document's `name` is its identity and never changes; every other field may. Each service checks the role, writes row, Event
and audit entry in one transaction, and wakes the reconcile loop after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from django.db import IntegrityError, transaction
from django.utils import timezone

from controlplane import publish
from controlplane.access import audit
from controlplane.access.once import Once
from controlplane.access.roles import Actor
from controlplane.access.roles import Role as Access
from controlplane.deployments import effects, permission, tasks
from controlplane.deployments.models import Deployment, Engine, Event, Revision
from controlplane.deployments.rows import spec_of
from controlplane.fleet import spec
from controlplane.fleet.errors import Conflict, InvalidInput, NotFound, Unavailable
from controlplane.fleet.lifecycle import State
from controlplane.fleet.model import Role
from controlplane.fleet.spec import DeploymentSpec


class Change(NamedTuple):
    field: str
    """Dotted: `pools.decode.replicas`."""
    old: Any
    """None: the default, or not there."""
    new: Any


class Applied(NamedTuple):
    created: bool
    changes: list[Change]
    needs_new_engines: bool
    """Running engines are drained and replaced: the change cannot reach them."""
    deployment: Deployment | None
    """None after a dry run of a creation."""
    stops: str = ""
    """What stops answering by it, in one sentence; empty: nothing."""


@transaction.atomic
def create(*, actor: Actor, document: Mapping[str, Any], token: str = "") -> Deployment:
    """A new deployment. One that cannot be placed yet is accepted: its engines say what they wait for. `token`: makes a second
    sending harmless (`access.once`).

    Raises `Forbidden` (needs operator), `InvalidInput` (names the field) or `Conflict` (a name is taken).
    """
    actor.require(Access.OPERATOR)
    wanted = spec.parse(document)
    permission.check(actor, wanted, None)
    sent = Once(actor, "deployment.create", token, spec.document(wanted))
    if sent.target:
        return _existing(sent.target, None)
    row = _create(actor, wanted)
    sent.made(row.name)
    return row


@transaction.atomic
def apply(
    *, actor: Actor, document: Mapping[str, Any], generation: int | None = None, dry_run: bool = False
) -> Applied:
    """Make the deployment of that name be what the document says: create it, change it, or leave it alone.

    `generation`: the one the change is meant for (0: it must not exist). `dry_run`: only tell what would change.
    Raises as `create` does, and `Conflict` with the present generation when that is another.
    """
    actor.require(Access.OPERATOR)
    wanted = spec.parse(document)
    row = _locked(wanted.name)
    permission.check(actor, wanted, spec_of(row.intent) if row is not None else None)
    if row is None:
        if generation:
            raise Conflict(f"{wanted.name} does not exist any more", field="generation")
        _check_served_name(wanted)
        created = None if dry_run else _create(actor, wanted)
        return Applied(True, changes_between({}, spec.document(wanted)), False, created)
    _check_generation(row, generation)
    old = spec_of(row.intent)
    changes = changes_between(spec.document(old), spec.document(wanted))
    new_engines = wanted.engine_part() != old.engine_part()
    if changes and wanted.served_name != old.served_name:
        _check_served_name(wanted)
    stops = effects.of_change(old, wanted, serving=effects.is_serving(row))
    if changes and not dry_run:
        _change(actor, row, wanted, changes, action="deployment.apply")
    return Applied(False, changes, new_engines, row, stops)


@transaction.atomic
def preview(*, actor: Actor, name: str, changes: Mapping[str, Any], generation: int | None = None) -> Applied:
    """What `patch` would do with these changes, and what would stop by it. Changes nothing. Raises as `patch` does."""
    actor.require(Access.OPERATOR)
    row = _existing(name, generation)
    return _told_only(row, _patched(actor, row, changes))


@transaction.atomic
def preview_scale(*, actor: Actor, name: str, role: Role, replicas: int, generation: int | None = None) -> Applied:
    """The same of `scale`."""
    actor.require(Access.OPERATOR)
    row = _existing(name, generation)
    return _told_only(row, spec_of(row.intent).with_replicas(role, replicas))


def _told_only(row: Deployment, wanted: DeploymentSpec) -> Applied:
    old = spec_of(row.intent)
    changes = changes_between(spec.document(old), spec.document(wanted))
    stops = effects.of_change(old, wanted, serving=effects.is_serving(row))
    return Applied(False, changes, wanted.engine_part() != old.engine_part(), row, stops)


@transaction.atomic
def patch(*, actor: Actor, name: str, changes: Mapping[str, Any], generation: int | None = None) -> Deployment:
    """Merge the changes into the document (JSON merge patch: mappings merge, null takes a field away).

    Raises `Forbidden` (needs operator), `NotFound`, `InvalidInput` or `Conflict`.
    """
    actor.require(Access.OPERATOR)
    row = _existing(name, generation)
    wanted = _patched(actor, row, changes)
    found = changes_between(spec.document(spec_of(row.intent)), spec.document(wanted))
    if found:
        _change(actor, row, wanted, found, action="deployment.patch")
    return row


def _patched(actor: Actor, row: Deployment, changes: Mapping[str, Any]) -> DeploymentSpec:
    if changes.get("name", row.name) != row.name:
        raise InvalidInput("name: a deployment keeps its name; create another and delete this one", field="name")
    wanted = spec.parse(_merged(row.intent, changes))
    permission.check(actor, wanted, spec_of(row.intent))
    if wanted.served_name != row.served_name:
        _check_served_name(wanted)
    return wanted


@transaction.atomic
def scale(
    *, actor: Actor, name: str, role: Role, replicas: int, generation: int | None = None, seen: int | None = None
) -> Deployment:
    """Set one pool's replicas; 0 stops it. `seen`: the number that the change was made from. Where the pool has another one
    now, nothing is changed (unless it has the wanted one already).

    Raises `Forbidden` (needs operator), `NotFound`, `InvalidInput` (no such pool, bad count) or `Conflict`.
    """
    actor.require(Access.OPERATOR)
    row = _existing(name, generation)
    old = spec_of(row.intent)
    wanted = old.with_replicas(role, replicas)
    if seen is not None and old.pools[role].replicas not in (seen, replicas):
        raise Conflict(
            f"{role} has {old.pools[role].replicas} replicas now, not {seen}: somebody changed it meanwhile",
            field="replicas",
            generation=row.generation,
        )
    changes = changes_between(spec.document(old), spec.document(wanted))
    if changes:
        _change(actor, row, wanted, changes, action="deployment.scale")
    return row


@transaction.atomic
def retry(*, actor: Actor, name: str, engine: str) -> None:
    """Try a failed engine again now instead of after its back-off. Asking twice is no error.

    `engine`: id or short name. Raises `Forbidden` (needs operator), `NotFound`, or `Conflict` for one that has not failed.
    """
    actor.require(Access.OPERATOR)
    deployment = _existing(name, None)
    row = next((e for e in deployment.engines.exclude(state=State.STOPPED) if engine in (e.pk, e.name)), None)
    if row is None:
        raise NotFound(f"{name} has no engine {engine}")
    failed = Engine.objects.filter(pk=row.pk, state=State.FAILED, attempt=row.attempt)
    if not failed.update(retry_asked=row.attempt):
        raise Conflict(f"{row.name} has not failed: it is {row.state}, attempt {row.attempt}")
    if row.retry_asked != row.attempt:
        audit.record(actor=actor, action="engine.retry", target=row.pk, attempt=row.attempt)
        _told(actor, deployment, "retry-asked", f"{name}: {row.name} is tried again now.", engine=row.pk)


@transaction.atomic
def deletion(*, actor: Actor, name: str) -> str:
    """What `delete` would stop, in words. Raises as `delete` does."""
    actor.require(Access.OPERATOR)
    row = _locked(name)
    if row is None:
        raise NotFound(f"there is no deployment {name}")
    return effects.of_deletion(row, spec_of(row.intent))


@transaction.atomic
def delete(*, actor: Actor, name: str) -> None:
    """Let its engines finish their requests and end; then the row goes. Asking twice is no error.

    Raises `Forbidden` (needs operator) or `NotFound`.
    """
    actor.require(Access.OPERATOR)
    row = _locked(name)
    if row is None:
        raise NotFound(f"there is no deployment {name}")
    if row.deleting_since is not None:
        return
    row.deleting_since = timezone.now()
    row.save(update_fields=["deleting_since", "updated_at"])
    audit.record(actor=actor, action="deployment.delete", target=name)
    _told(actor, row, "deleting", f"{name}: is being deleted.")


def _create(actor: Actor, wanted: DeploymentSpec) -> Deployment:
    if (there := _locked(wanted.name)) is not None:
        ending = ", which is being deleted: wait until its last engine has stopped" if there.deleting_since else ""
        raise Conflict(
            f"name: there is already a deployment {wanted.name}{ending}", field="name", generation=there.generation
        )
    _check_served_name(wanted)
    intent = spec.document(wanted)
    try:
        with transaction.atomic():
            row = Deployment.objects.create(name=wanted.name, served_name=wanted.served_name, intent=intent)
    except IntegrityError:  # somebody else's creation came between
        raise Conflict(
            f"name: somebody else has just created {wanted.name}, or a deployment with its served name", field="name"
        ) from None
    _add_revision(actor, row, wanted, 1)
    audit.record(actor=actor, action="deployment.create", target=row.name, document=intent, **_admin_given(wanted))
    _told(actor, row, "created", f"{row.name}: created.")
    return row


def _change(actor: Actor, row: Deployment, wanted: DeploymentSpec, changes: list[Change], *, action: str) -> None:
    old = spec_of(row.intent)
    row.intent, row.served_name = spec.document(wanted), wanted.served_name
    row.generation += 1
    try:
        with transaction.atomic():
            row.save(update_fields=["intent", "served_name", "generation", "updated_at"])
    except IntegrityError:
        raise Conflict(
            f"served_name: another deployment has just taken the served name {wanted.served_name}", field="served_name"
        ) from None
    new_engines = wanted.engine_part() != old.engine_part()
    if new_engines:
        number = max(row.revisions.values_list("number", flat=True)) + 1
        _add_revision(actor, row, wanted, number)
    told = [change._asdict() for change in changes]
    audit.record(actor=actor, action=action, target=row.name, changes=told, **_admin_given(wanted))
    kind = "scaled" if all(change.field.endswith(".replicas") for change in changes) else "changed"
    tail = f" Revision {number} replaces its engines." if new_engines else ""
    _told(actor, row, kind, f"{row.name}: {'; '.join(_shown(change) for change in changes)}.{tail}")


def _admin_given(wanted: DeploymentSpec) -> dict[str, Any]:
    """For the audit: options that may run code or read files."""
    options = wanted.admin_arguments()
    return {"admin_arguments": options} if options else {}


def _add_revision(actor: Actor, row: Deployment, wanted: DeploymentSpec, number: int) -> None:
    Revision.objects.create(
        deployment=row, number=number, spec=spec.document(wanted.engine_part()), created_by=actor.name
    )


def _told(actor: Actor, row: Deployment, kind: str, message: str, engine: str = "") -> None:
    Event.objects.create(deployment_name=row.name, engine_id=engine, kind=kind, message=message, actor=actor.name)
    transaction.on_commit(tasks.wake, robust=True)
    transaction.on_commit(lambda: _push(row.name), robust=True)


def _push(name: str) -> None:
    try:
        publish.current().push_live("deployments", f"deployment:{name}")
    except Unavailable:
        return  # the change is stored; the browsers see it with the next one


def _locked(name: str) -> Deployment | None:
    return Deployment.objects.select_for_update().filter(name=name).first()


def _existing(name: str, generation: int | None) -> Deployment:
    row = _locked(name)
    if row is None:
        raise NotFound(f"there is no deployment {name}")
    _check_generation(row, generation)
    return row


def _check_generation(row: Deployment, generation: int | None) -> None:
    if row.deleting_since is not None:
        raise Conflict(f"{row.name} is being deleted", generation=row.generation)
    if generation is not None and generation != row.generation:
        raise Conflict(
            f"{row.name} changed meanwhile: its generation is {row.generation}, not {generation}; read it again",
            field="generation",
            generation=row.generation,
        )


def _check_served_name(wanted: DeploymentSpec) -> None:
    others = Deployment.objects.filter(served_name=wanted.served_name, deleting_since=None).exclude(name=wanted.name)
    if (other := others.first()) is not None:
        raise Conflict(
            f"served_name: {wanted.served_name} is already the served name of deployment {other.name}",
            field="served_name",
            names_first=True,
        )


def _merged(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """RFC 7396."""
    merged = dict(document)
    for key, value in changes.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            below = merged.get(key)
            merged[key] = _merged(below if isinstance(below, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


def changes_between(old: Mapping[str, Any], new: Mapping[str, Any], at: str = "") -> list[Change]:
    """What differs between two documents, field by field in the order of their names."""
    found: list[Change] = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) or isinstance(after, Mapping):
            found += changes_between(before or {}, after or {}, f"{at}{key}.")
        elif before != after:
            found.append(Change(f"{at}{key}", before, after))
    return found


def _shown(change: Change) -> str:
    old, new = ("default" if value is None else value for value in (change.old, change.new))
    return f"{change.field} {old} → {new}"
