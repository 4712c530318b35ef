"""Who acts, and what they may do: three roles, each including the one below."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from controlplane.fleet.errors import Forbidden


class Role(IntEnum):
    VIEWER = 1
    """Sees everything but secrets."""
    OPERATOR = 2
    """Also deploys, scales, deletes, cordons."""
    ADMIN = 3
    """Also keys, join tokens, users, removal of nodes."""

    @property
    def label(self) -> str:
        return self.name.lower()


class Actor(NamedTuple):
    """The one on whose behalf a service runs; its name is what audit rows and events show."""

    name: str
    role: Role
    kind: str = "user"
    """user, key or system."""
    address: str = ""

    def require(self, role: Role) -> None:
        """Raises `Forbidden` unless the actor has this role or a higher one."""
        if self.role < role:
            raise Forbidden(f"this needs the role {role.label}; {self.name} has the role {self.role.label}")


SYSTEM = Actor("tandem", Role.ADMIN, "system")
"""The product itself: reconcile, first start, the demo."""
