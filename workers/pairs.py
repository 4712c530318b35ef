"""Which prefill engines one decode engine has really taken KV from: tries each once, keeps what worked until requests fail over
it, tries again what failed.

Works in a short thread of its own, so that a transfer that hangs delays no health probe.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Collection

from controlplane.fleet.model import EngineAssignment, PairProof, Peer
from workers.probe import EngineClient, Identity, Unanswered, prove_pair

log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 2.0
LONGEST_RETRY_SECONDS = 60.0
PROVE_ANEW_SECONDS = 20.0
"""Between two proofs of a pair over which requests fail."""
UNREACHABLE_TRIES = 5
"""An engine that is up, as the control plane says, and not to be reached from here so many times: no KV can come from it."""


class PairProver:
    """The proofs of one decode engine. A proof belongs to one peer process: its engine id and attempt."""

    def __init__(self, known: Collection[PairProof], *, proved: Callable[[], None], chance: random.Random) -> None:
        self._proofs = {(proof.prefill, proof.prefill_attempt): proof for proof in known}
        self._proved = proved
        self._chance = chance
        self._retry: dict[tuple[str, int], tuple[int, float]] = {}
        self._unreached: dict[tuple[str, int], int] = {}
        self._doubted: frozenset[tuple[str, int]] = frozenset()
        self._proved_at: dict[tuple[str, int], float] = {}
        self._wanted: frozenset[tuple[str, int]] = frozenset(self._proofs)
        self._lock = threading.Lock()
        self._busy = False
        self._closed = False

    def proofs(self) -> tuple[PairProof, ...]:
        with self._lock:
            return tuple(self._proofs[key] for key in sorted(self._proofs))

    def keep_only(self, peers: Collection[Peer]) -> None:
        """Drops what is known of peers that are no longer asked about."""
        with self._lock:
            self._wanted = frozenset((peer.engine, peer.attempt) for peer in peers)
            self._proofs = {key: proof for key, proof in self._proofs.items() if key in self._wanted}
            self._retry = {key: tries for key, tries in self._retry.items() if key in self._wanted}
            self._unreached = {key: tries for key, tries in self._unreached.items() if key in self._wanted}
            self._proved_at = {key: at for key, at in self._proved_at.items() if key in self._wanted}
            self._doubted = frozenset((peer.engine, peer.attempt) for peer in peers if peer.doubted)

    def close(self) -> None:
        """The engine has ended: a try that still runs says nothing about the pair."""
        self._closed = True

    def advance(self, assignment: EngineAssignment, url: str, identity: Identity) -> None:
        """Begins the tries that are due, unless some still run."""
        self.keep_only(assignment.peers)
        now = time.monotonic()
        due = [peer for peer in assignment.peers if self._is_due((peer.engine, peer.attempt), now)]
        if due and not self._busy and not self._closed:
            self._busy = True
            threading.Thread(
                target=self._try_all,
                args=(due, assignment, url, identity),
                name=f"{assignment.engine} pairs",
                daemon=True,
            ).start()

    def _is_due(self, key: tuple[str, int], now: float) -> bool:
        with self._lock:
            proof = self._proofs.get(key)
            if proof and proof.ok:
                return (
                    key in self._doubted
                    and now >= self._proved_at.get(key, now - PROVE_ANEW_SECONDS) + PROVE_ANEW_SECONDS
                )
            return now >= self._retry.get(key, (0, now))[1]

    def _try_all(self, due: list[Peer], assignment: EngineAssignment, url: str, identity: Identity) -> None:
        try:
            for peer in due:
                self._try(peer, assignment, url, identity)
        except Exception:
            log.exception("%s: the transfer probe failed in the agent.", assignment.engine)
        finally:
            self._busy = False

    def _try(self, peer: Peer, assignment: EngineAssignment, url: str, identity: Identity) -> None:
        with EngineClient(url, assignment.secret) as decode, EngineClient(peer.url, peer.secret) as prefill:
            try:
                prefill.health()
            except Unanswered as error:
                proof = self._unreachable(peer, error)
            else:
                proof = prove_pair(
                    decode,
                    prefill,
                    peer,
                    model=assignment.spec.served_name,
                    block_size=identity.block_size or assignment.spec.block_size,
                    max_model_len=identity.max_model_len,
                    chance=self._chance,
                )
        self._take_in(peer, proof)

    def _unreachable(self, peer: Peer, error: Unanswered) -> PairProof | None:
        """Not up yet, or no longer: that is no statement about the pair, unless it stays so while the peer is wanted."""
        key = (peer.engine, peer.attempt)
        with self._lock:
            self._unreached[key] = tries = self._unreached.get(key, 0) + 1
        if tries < UNREACHABLE_TRIES:
            return None
        return PairProof(*key, False, f"{peer.engine} cannot be reached at {peer.url} from this node: {error}")

    def _take_in(self, peer: Peer, proof: PairProof | None) -> None:
        key = (peer.engine, peer.attempt)
        with self._lock:
            if self._closed or key not in self._wanted:
                return
            failures = 0 if proof is None else self._retry.get(key, (0, 0.0))[0] + 1
            wait = min(FIRST_RETRY_SECONDS * 2 ** max(failures - 1, 0), LONGEST_RETRY_SECONDS)
            self._retry[key] = (failures, time.monotonic() + wait)
            if proof is None:
                return
            self._proofs[key] = proof
            self._proved_at[key] = time.monotonic()
            if proof.ok:
                self._retry.pop(key, None)
                self._unreached.pop(key, None)
        self._proved()
