"""Who may hand which options to engines: pure. What runs code or reads files on the nodes is an admin's to give."""

from __future__ import annotations

from controlplane.access.roles import Actor, Role
from controlplane.fleet.errors import AdminArgument, Problems
from controlplane.fleet.model import Role as Pool
from controlplane.fleet.spec import DeploymentSpec


def check(actor: Actor, wanted: DeploymentSpec, old: DeploymentSpec | None) -> None:
    """An operator keeps the options that an admin gave a pool, as long as they act on the same model and runtime; new or other
    ones are an admin's to give. Raises `AdminArgument` with every pool that has such."""
    if actor.role >= Role.ADMIN:
        return
    found = Problems()
    for role, options in wanted.admin_arguments().items():
        if old is not None and _same(wanted, old, role):
            continue
        at = f"pools.{role}.extra_args"
        kept = old is not None and old.admin_arguments().get(role) == options
        what = (
            "an admin gave them for another model or runtime"
            if kept
            else "they may run code or read files on the nodes"
        )
        with found.part():
            raise AdminArgument(
                f"{at}: {', '.join(options)} need the role admin, because {what}; remove them, write an abbreviated option in "
                "full, or ask an admin",
                field=at,
            )
    found.raise_any()


def _same(wanted: DeploymentSpec, old: DeploymentSpec, pool: Pool) -> bool:
    kept = pool in old.pools and old.pools[pool].extra_args == wanted.pools[pool].extra_args
    return kept and (wanted.model, wanted.runtime) == (old.model, old.runtime)
