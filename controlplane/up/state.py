"""The state folder: its layout, its modes, and the lock that lets one `make up` run on it at a time.

Never reads or writes what another program owns in it (database, router snapshot, engine records).
"""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path

from controlplane.fleet.errors import Conflict, InvalidInput

SOCKET_PATH_LIMIT = 100
"""Bytes. The kernel takes 107; some are left for the suffix that supervisord adds while it binds."""

ODD = set(';#%"\\\n\r\t')
"""Characters that supervisord's or Redis's configuration would take for something else."""


class StateFolder:
    """`TANDEM_HOME`, mode 0700; every file made here is 0600 from its first byte on."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.logs = home / "logs"
        self.run = home / "run"
        self.secrets = home / "secrets"
        self.redis = home / "redis"
        self.supervisor_socket = self.run / "supervisor.sock"
        self.supervisor_config = self.run / "supervisord.conf"
        self.supervisor_pid = self.run / "supervisord.pid"
        self.demo_key = self.secrets / "demo_key"
        self.manage_key = self.secrets / "manage_key"
        self.join_token = self.secrets / "join_token"
        self.redis_url = self.secrets / "redis_url"
        self.database_url = self.secrets / "database_url"
        self._lock: int | None = None

    def prepare(self) -> None:
        """Make the folders.

        Raises `InvalidInput` when the path is too long for a socket, or cannot be written.
        """
        if len(os.fsencode(self.supervisor_socket)) > SOCKET_PATH_LIMIT:
            raise InvalidInput(
                f"TANDEM_HOME: {self.home} is too long a path for the socket in it; choose a folder whose path is shorter.",
                field="TANDEM_HOME",
            )
        if odd := set(str(self.home)) & ODD:
            raise InvalidInput(
                f"TANDEM_HOME: {self.home} holds {' '.join(sorted(odd))}, which configuration files cannot; choose another path.",
                field="TANDEM_HOME",
            )
        try:
            self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.home.chmod(0o700)
            for folder in (self.logs, self.run, self.secrets, self.redis):
                folder.mkdir(exist_ok=True, mode=0o700)
            self.write(self.run / "probe", "")
        except OSError as error:
            raise InvalidInput(
                f"TANDEM_HOME: {self.home} cannot be used: {error.strerror}. "
                "Make it a folder of this user with room on its disk, or set TANDEM_HOME to another one.",
                field="TANDEM_HOME",
            ) from None
        (self.run / "probe").unlink(missing_ok=True)

    def lock(self) -> None:
        """Become the one `make up` of this folder until `unlock` or the end of this process, however it ends.

        Raises `Conflict` naming the process that holds it.
        """
        # Not inheritable (Python's default): a child that outlives this process must not hold the lock.
        handle = os.open(self.run / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(handle, 32).decode(errors="replace").strip()
            os.close(handle)
            raise Conflict(
                f"Tandem already runs on {self.home} (process {holder or 'unknown'}). Stop that one first (Ctrl-C where it "
                "runs), or give this one a folder and ports of its own: TANDEM_HOME, TANDEM_WEB_PORT, TANDEM_OPENAI_PORT."
            ) from None
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        self._lock = handle

    @property
    def locked(self) -> bool:
        """Whether this process is the one. No longer so when the folder was removed below it, and perhaps made again."""
        if self._lock is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._lock), os.stat(self.run / "lock"))
        except FileNotFoundError:
            return False

    def unlock(self) -> None:
        if self._lock is not None:
            os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None

    def write(self, path: Path, text: str) -> None:
        """Replace a file at once, readable by the owner alone."""
        fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
            fresh.replace(path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise

    def read(self, path: Path) -> str:
        """A file's text without surrounding space; empty when there is none."""
        try:
            return path.read_text().strip()
        except FileNotFoundError:
            return ""
