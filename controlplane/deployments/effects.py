"""What a change would stop, in one sentence for people, told before the change is made. Empty: nothing stops."""

from __future__ import annotations

from controlplane.access.models import ApiKey
from controlplane.access.services import INFERENCE, list_keys
from controlplane.deployments.models import Deployment, Engine
from controlplane.fleet.lifecycle import State
from controlplane.fleet.model import Role
from controlplane.fleet.spec import DeploymentSpec

ANSWERING = (Role.DECODE, Role.AGGREGATED)
"""Pools whose engines answer clients. Without prefill engines, decode reads the prompts itself."""
_SERVING = (State.READY, State.UNHEALTHY, State.LOST)


def of_change(old: DeploymentSpec, new: DeploymentSpec, *, serving: bool) -> str:
    """Of making the deployment `new`. `serving`: some engine answers requests now."""
    served = old.served_name
    gone = [role for role in ANSWERING if role in old.pools and old.pools[role].replicas]
    left = [role for role in ANSWERING if role in new.pools and new.pools[role].replicas]
    if gone and not left:
        return f"Nobody will answer requests for {served} until {gone[0]} is scaled up again."
    if serving and new.engine_part() != old.engine_part():
        said = f"All its engines are replaced: nobody will answer requests for {served} until the first new engine is ready."
        if new.served_name != served:
            said = f"{said} Clients must then ask for {new.served_name}."
        return said
    return ""


def of_deletion(row: Deployment, spec: DeploymentSpec) -> str:
    """Of deleting the deployment. Never empty: it cannot be undone."""
    said = f"{row.name} and its revisions will be gone; its events stay."
    if any(spec.pools[role].replicas for role in ANSWERING if role in spec.pools):
        return f"Nobody will answer requests for {spec.served_name} any more. {said}"
    return said


def of_node_removal(name: str) -> str:
    """Of forgetting the node: the models that only its engines answer."""
    here: set[str] = set()
    elsewhere: set[str] = set()
    engines = Engine.objects.filter(role__in=ANSWERING, state__in=_SERVING, node__isnull=False)
    for served, node in engines.values_list("deployment__served_name", "node__name"):
        (here if node == name else elsewhere).add(served)
    return _nobody(sorted(here - elsewhere), "until its engines run on another node")


def of_revocation(key: ApiKey) -> str:
    """Of revoking the key: whom it shuts out. Never empty: it cannot be undone."""
    if key.scope != INFERENCE:
        return f"Whoever uses {key.name} for REST or the tandem command is refused within seconds."
    others = [other for other in list_keys() if other.pk != key.pk and other.scope == INFERENCE and other.works()]
    opened = {model for other in others for model in other.models_allowed}
    said = f"Clients that use {key.name} are refused within seconds."
    if any(not other.models_allowed for other in others):
        return said
    served = key.models_allowed or list(
        Deployment.objects.filter(deleting_since=None).order_by("name").values_list("served_name", flat=True)
    )
    shut = sorted(set(served) - opened)
    if not others:
        return f"{said} It is the last key that opens the endpoint."
    return f"{said} It is the last key that opens {_listed(shut)}." if shut else said


def is_serving(row: Deployment) -> bool:
    """Some engine of the deployment answers requests now, or did until its node fell silent."""
    return row.engines.filter(role__in=ANSWERING, state__in=_SERVING).exists()


def _nobody(served: list[str], until: str) -> str:
    return f"Nobody will answer requests for {_listed(served)} {until}." if served else ""


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
