"""Everything that people and joining agents change about nodes. What a node is comes from its reports (`reports.py`)."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from datetime import timedelta
from typing import NamedTuple

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from controlplane import publish
from controlplane.access import audit
from controlplane.access.once import Once
from controlplane.access.roles import SYSTEM, Actor, Role
from controlplane.fleet.errors import Conflict, Forbidden, InvalidInput, NotFound, Unavailable
from controlplane.fleet.lifecycle import HOLDS_NODE
from controlplane.fleet.plural import plural
from controlplane.fleet.wire import checked_node_name
from controlplane.nodes import addresses
from controlplane.nodes.models import JoinToken, Node
from controlplane.nodes.presence import Presence, presence
from controlplane.nodes.queries import silent_seconds

REMOVED = "node.remove"
"""Action in the audit."""
MAX_TOKEN_HOURS = 24 * 7


class Joined(NamedTuple):
    name: str
    redis_url: str
    """Holds the node's own password, which is stored nowhere else."""
    address: str = ""
    """On which its engines listen."""
    took_over: bool = False
    """Another node had this name. Its access is gone, and engines it had are started anew with new secrets."""
    allowed_by: str = ""
    """Who made the token."""


@transaction.atomic
def create_join_token(*, actor: Actor, hours: int = 1, node: str = "", address: str = "", once: str = "") -> str:
    """A token with which one agent may join, once, within so many hours. Only its digest is kept.

    `node`: the only name that it is good for, and good also if a node of this name has joined before; empty: any new name.
    `address`: where that node's engines will listen, needed only where it is not the address that the node asks from.
    `once`: makes a second sending harmless (`access.once`). Raises `Forbidden` (needs admin), `InvalidInput` or `Conflict`.
    """
    actor.require(Role.ADMIN)
    if not 1 <= hours <= MAX_TOKEN_HOURS:
        raise InvalidInput(f"hours: choose 1 to {MAX_TOKEN_HOURS}", field="hours")
    bound: dict[str, str] = {}
    if node:
        try:
            bound["node"] = checked_node_name(node)
        except InvalidInput as error:
            raise InvalidInput(f"node: {error.message.removeprefix('name: ')}", field="node") from None
    if address:
        bound["address"] = addresses.checked(address)
    sent = Once(actor, "join_token.create", once, [hours, node, address])
    token = f"tdj-{sent.secret()}"
    if sent.target:
        return token
    digest = _digest(token)
    expires_at = timezone.now() + timedelta(hours=hours)
    JoinToken.objects.create(digest=digest, created_by=actor.name, expires_at=expires_at, **bound)
    audit.record(actor=actor, action="join_token.create", target=digest[:8], hours=hours, **bound)
    sent.made(f"join token {digest[:8]}")
    return token


@transaction.atomic
def join(
    *, token: str, name: str, redis_host: str, address: str = "", seen: str = "", former_password: str = ""
) -> Joined:
    """Let an agent in: use the token up, make the node, give it a Redis user of its own. `redis_host`: the host at which the
    agent reaches the control plane; `address` and `seen`: see `addresses.settle`.

    A name that has joined before is let in again if the agent shows the node's `former_password` (it stays the same node), or
    if the token was made for this name: then another machine takes the name over, under a node row of its own, so that what
    the former one ran and knew is started anew. Either way the former connections to Redis are cut.

    Raises `InvalidInput` (name, address), `Forbidden` (the token is unknown, used or expired: alike; or made for another name or
    address, or not for a name that is known), `Conflict` (a node of this name is reporting now), `Unavailable` (Redis). The
    token is used up only when all went well.
    """
    checked_node_name(name)
    now = timezone.now()
    row = JoinToken.objects.select_for_update().filter(digest=_digest(token), used_at=None, expires_at__gt=now).first()
    if row is None or not JoinToken.objects.filter(pk=row.pk, used_at=None).update(used_at=now, used_by=name):
        raise Forbidden("this join token is unknown, used or expired; make a new one on the Nodes page")
    if row.node and row.node != name:
        raise Forbidden(f"this join token is for node {row.node}: set TANDEM_NODE_NAME={row.node}, or make another")
    settled = addresses.settle(address, seen=seen, confirmed=row.address) if address or seen or row.address else ""
    node = Node.objects.select_for_update().filter(name=name).first()
    took_over = node is not None and not hmac.compare_digest(_digest(former_password), node.redis_digest)
    if took_over and not row.node:
        raise Forbidden(
            f"a node named {name} has joined before, and this token is for new nodes: set another TANDEM_NODE_NAME, or let an "
            f"admin make a token for this name: tandem join-token --node {name}"
        )
    if node is not None and presence(silent_seconds(node, now)) is Presence.REPORTING:
        raise Conflict(f"a node named {name} is reporting now: stop its agent, or set another TANDEM_NODE_NAME")
    publisher = publish.current()
    if node is not None and took_over:
        cordoned = node.cordoned
        node.delete()
        node = Node(name=name, cordoned=cordoned)
    password = secrets.token_hex(32)
    node = node or Node(name=name)
    node.redis_digest, node.address = _digest(password), settled or node.address
    node.plan_sent_at = None
    node.save()
    audit.record(
        actor=Actor(name, Role.VIEWER, "node", seen),
        action="node.take_over" if took_over else "node.join",
        target=name,
        token=row.digest[:8],
        address=node.address,
    )
    url = publisher.node_url(name, password, redis_host)
    publisher.forget_node(name)  # whoever is connected as this node is cut
    publisher.ensure_node_user(name, node.redis_digest)
    transaction.on_commit(lambda: _changed(name), robust=True)
    return Joined(name, url, node.address, took_over, row.created_by)


@transaction.atomic
def cut_off(*, name: str, why: str) -> None:
    """Take away the access of a node that misuses it, and what it stored; its row and its engines' stay. `why`: as `node <name> …`.
    It comes back by a token made for its name. A node that is not there any more loses what it stored. Raises `Unavailable`."""
    if Node.objects.filter(name=name).update(redis_digest="", cut_off=why[:300]):
        audit.record(actor=SYSTEM, action="node.cut_off", target=name, why=why)
    publish.current().shut_out(name)
    transaction.on_commit(lambda: _changed(name), robust=True)


def is_replaced(*, name: str, password: str) -> bool:
    """Whether the name belongs to another machine by now: it has joined since, and this is no longer the node's password."""
    digest = Node.objects.filter(name=name).values_list("redis_digest", flat=True).first()
    return bool(digest) and not hmac.compare_digest(_digest(password), str(digest))


def is_removed(name: str) -> bool:
    """Whether an admin removed the node of that name, and none has joined by it since."""
    return not Node.objects.filter(name=name).exists() and audit.was_done(action=REMOVED, target=name)


def cordon(*, actor: Actor, name: str) -> Node:
    """Give the node no new engines; those it runs go on. Raises `Forbidden` (needs operator) or `NotFound`."""
    return _set_cordoned(actor, name, True)


def uncordon(*, actor: Actor, name: str) -> Node:
    """Let the node take engines again. Raises `Forbidden` (needs operator) or `NotFound`."""
    return _set_cordoned(actor, name, False)


@transaction.atomic
def remove(*, actor: Actor, name: str, untrusted: bool = False) -> None:
    """Take the node's access away and forget it. Engines of a node that is lost are placed anew.

    `untrusted`: also one that still reports and runs engines, as nobody can be asked to stop its agent; everything that it
    stored goes too, its logs included. Raises `Forbidden` (needs admin), `NotFound`, `Conflict` (it still reports and runs
    engines) or `Unavailable` (Redis).
    """
    actor.require(Role.ADMIN)
    node = _locked(name)
    states = [state.value for state in HOLDS_NODE]
    running: int = node.engines.filter(state__in=states).count()
    if running and not untrusted and presence(silent_seconds(node, timezone.now())) is Presence.REPORTING:
        raise Conflict(
            f"{name} runs {plural(running, 'engine')}: cordon it and scale them away, or stop its agent first"
        )
    audit.record(actor=actor, action=REMOVED, target=name, engines=running, untrusted=untrusted)
    node.delete()
    if untrusted:
        publish.current().shut_out(name)
    else:
        publish.current().forget_node(name)
    transaction.on_commit(lambda: _changed(name), robust=True)


@transaction.atomic
def _set_cordoned(actor: Actor, name: str, cordoned: bool) -> Node:
    actor.require(Role.OPERATOR)
    node = _locked(name)
    if Node.objects.filter(Q(pk=node.pk) & ~Q(cordoned=cordoned)).update(cordoned=cordoned):
        audit.record(actor=actor, action="node.cordon" if cordoned else "node.uncordon", target=name)
        transaction.on_commit(lambda: _changed(name), robust=True)
    node.cordoned = cordoned
    return node


def _locked(name: str) -> Node:
    node = Node.objects.select_for_update().filter(name=name).first()
    if node is None:
        raise NotFound(f"there is no node {name}")
    return node


def _changed(name: str) -> None:
    try:
        publish.current().push_live("nodes", f"node:{name}")
    except Unavailable:
        return  # the change is stored; the browsers see it with the next one


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
