"""A throw-away PostgreSQL cluster: `python tests/controlplane/postgres.py COMMAND …` runs the command with DATABASE_URL.

The cluster lives in a temporary folder, listens on a free port of 127.0.0.1 alone, belongs to an unprivileged user
(initdb refuses root), and is gone when the command has ended, whatever way. The exit status is the command's.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_USERS = ("postgres", "nobody")
_REMEDY = "PostgreSQL is not installed: apt-get install postgresql (the suite runs on it as well as on SQLite)"


def _program(name: str) -> str:
    """A server program of the newest installed version. Debian keeps them out of PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda p: float(p.parts[4]), reverse=True)
    program = str(found[0]) if found else shutil.which(name)
    if program is None:
        raise SystemExit(_REMEDY)
    return program


def _user() -> pwd.struct_passwd | None:
    """Who runs the cluster: nobody else when this is not root."""
    if os.geteuid() != 0:
        return None
    for name in _USERS:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise SystemExit("initdb refuses root, and there is neither a user postgres nor nobody")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def cluster() -> Iterator[str]:
    """A running cluster's DATABASE_URL."""
    user = _user()
    who = {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    folder = Path(tempfile.mkdtemp(prefix="tandem-postgres-"))
    if user is not None:
        os.chown(folder, user.pw_uid, user.pw_gid)
    data, password, port = folder / "data", secrets.token_hex(16), _free_port()
    secret = folder / "password"
    secret.write_text(password)
    secret.chmod(0o644)  # inside a folder that only its owner enters
    env = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "HOME": str(folder)}
    options = f"-c listen_addresses=127.0.0.1 -p {port} -k {folder} -c fsync=off -c full_page_writes=off"

    def run(*command: str) -> None:
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, **who)  # type: ignore[call-overload]
        if done.returncode:
            raise SystemExit(f"{command[0]}: {done.stdout}{done.stderr}")

    try:
        run(_program("initdb"), "-D", str(data), "-U", "tandem", "-A", "scram-sha-256", f"--pwfile={secret}", "-N")
        run(_program("pg_ctl"), "-D", str(data), "-w", "-t", "60", "-l", str(folder / "log"), "-o", options, "start")
        try:
            yield f"postgres://tandem:{password}@127.0.0.1:{port}/postgres"
        finally:
            run(_program("pg_ctl"), "-D", str(data), "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(command: list[str]) -> int:
    if not command:
        raise SystemExit(__doc__)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster is taken down here too
    with cluster() as url:
        signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is the command's, which tidies up; its end is ours
        return subprocess.run(command, env={**os.environ, "DATABASE_URL": url}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
