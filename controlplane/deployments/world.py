"""What one step of the reconcile loop knows, as frozen records. Pure: `rows.py` reads them, `decide.py` turns them into the
next ones, `apply.py` writes the difference. Times are Unix seconds of the controller's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from msgspec import Struct

from controlplane.fleet.lifecycle import Event, State
from controlplane.fleet.model import NodeFacts, Observation, Phase, Role, Runtime
from controlplane.fleet.pairing import Incarnation
from controlplane.fleet.spec import DeploymentSpec
from controlplane.fleet.wire import RouterStatus


class NodeRecord(Struct, frozen=True):
    name: str
    facts: NodeFacts | None = None
    cordoned: bool = False
    silent_seconds: float = inf
    """Since its last new report, whoever was restarted meanwhile; infinite: it never reported."""
    took_plan: bool = False
    """Its newest report shows that it has taken in the newest plan made for it."""
    barred: str = ""
    """Why nothing new is placed on it, beside being cordoned; empty: nothing bars it."""


class EngineRecord(Struct, frozen=True):
    id: str
    deployment: str
    revision: int
    role: Role
    index: int
    state: State
    since: float
    secret: str
    reason: str = ""
    attempt: int = 1
    failures: int = 0
    node: str | None = None
    """Where it runs or last ran; None: nowhere yet, or its node was removed."""
    gpus: tuple[int, ...] = ()
    runtime: Runtime | None = None
    memory_fraction: float | None = None
    observation: Observation | None = None
    """Newest of this attempt."""
    reported: bool = False
    """Its node's newest report names this attempt."""
    ready_at: float | None = None
    left_version: int | None = None
    retry_asked: bool = False
    """Somebody asked to try again at once, after this attempt."""

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(self.id, self.attempt)

    @property
    def answers(self) -> bool:
        """A real completion came back, and nothing has been wrong since."""
        return (
            self.state in (State.WARMING, State.READY)
            and self.observation is not None
            and self.observation.phase is Phase.WARMING
        )

    @property
    def is_blamed(self) -> bool:
        """It calls itself healthy, and is unhealthy because requests or KV transfers fail by its fault."""
        return (
            self.state is State.UNHEALTHY and self.observation is not None and self.observation.phase is Phase.WARMING
        )

    @property
    def url(self) -> str:
        """Empty before its ports are known."""
        return (
            self.socket_url("http", self.observation.ports.http) if self.observation and self.observation.ports else ""
        )

    def socket_url(self, scheme: str, port: int) -> str:
        """One of its sockets; empty for port 0."""
        if self.observation is None or not port:
            return ""
        address = self.observation.address
        return f"{scheme}://[{address}]:{port}" if ":" in address else f"{scheme}://{address}:{port}"


class DeploymentRecord(Struct, frozen=True):
    name: str
    spec: DeploymentSpec
    """The intent, replicas and routing included."""
    revision: int
    """The newest; engines of another are drained and replaced."""
    deleting: bool = False


class World(Struct, frozen=True):
    nodes: Mapping[str, NodeRecord]
    deployments: Mapping[str, DeploymentRecord]
    engines: Mapping[str, EngineRecord]
    specs: Mapping[tuple[str, int], DeploymentSpec]
    """The engine part of each revision that is in use, by deployment and number."""
    routers: tuple[RouterStatus, ...] = ()
    steady: bool = True
    """The loop has run without a pause for long enough that what silence and limits did not say before it, they may say now."""


class Move(Struct, frozen=True):
    """One event of one engine: a history row, and the difference between two records."""

    engine: EngineRecord
    """After the event."""
    event: Event
    old: State
    message: str


class Decision(Struct, frozen=True):
    engines: dict[str, EngineRecord]
    """All of them, as they are to be."""
    moves: list[Move]
    created: list[EngineRecord]
    """In the state they were created in; `engines` may have them further on."""
    removed: list[str]
    """Engines whose rows go."""
    ended: list[str]
    """Deployments whose last engine has ended: their rows go."""
