"""The user that a root agent runs engines as (`TANDEM_ENGINE_USER`): the code of a model that somebody trusts reaches runtimes, models
and folders of its own, and none of the agent's secrets.

Engines of one node are this one user, as KV transfers share memory: they are not kept from each other. What such code has
written, the agent never follows by path: a link could lead to a file that only root may read.
"""

from __future__ import annotations

import errno
import grp
import json
import logging
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from controlplane.fleet.config import Config
from controlplane.fleet.errors import InvalidInput, ModelUnavailable

log = logging.getLogger(__name__)

VARIABLE = "TANDEM_ENGINE_USER"
DEVICE_GROUPS = ("video", "render")
"""Of GPUs, besides the user's own."""
STARTS = "workers.sim.__main__"
CHECKOUT = Path(__file__).resolve().parents[1]
CHECK_SECONDS = 60

_PROBE = """
import importlib, json, os, sys, tempfile
importlib.import_module(sys.argv[1])
told = json.loads(sys.argv[2])
sys.stdin.read()
def can(paths, mode): return [path for path in paths if os.access(path, mode)]
try: tempfile.TemporaryFile(dir=os.environ["TMPDIR"]).close()
except OSError as error: temporary = error.strerror
else: temporary = ""
print(json.dumps({
    "temporary": temporary,
    "entered": can(told["enter"], os.R_OK | os.W_OK | os.X_OK),
    "secret": can(told["secret"], os.R_OK) + can(told["secret"], os.X_OK),
    "written": can([*told["keep"], sys.prefix, os.path.dirname(sys.executable), *filter(os.path.isdir, sys.path)], os.W_OK),
}))
"""
_READS = "import os, sys; print(next((p for p in sys.argv[1:] if not os.access(p, os.R_OK | (os.path.isdir(p) and os.X_OK))), ''))"


class EngineUser(Struct, frozen=True):
    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    """Its own group among them: an empty list would not take the agent's away."""
    cache: Path

    @property
    def home(self) -> Path:
        """It may write here; what engines compile stays from one to the next."""
        return self.cache / "engine-users" / str(self.uid)

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The inherited one without what points into the agent's own home."""
        kept = {
            name: value for name, value in inherited.items() if not name.startswith(("XDG_", "HF_", "HUGGING", "SUDO_"))
        }
        return kept | {"HOME": str(self.home), "USER": self.name, "LOGNAME": self.name, "SHELL": "/bin/sh"}

    def make_home(self) -> None:
        """Also lets it pass through the cache folder. Raises `OSError`."""
        _make_passable(self.home.parent)
        for folder in (self.cache, self.home.parent):
            _allow(folder, 0o011)
        self.home.mkdir(mode=0o700, exist_ok=True)
        os.chown(self.home, self.uid, self.gid, follow_symlinks=False)

    def let_read(self, folder: Path) -> None:
        """What was made in the cache is made readable, once. Raises `ModelUnavailable` where a folder elsewhere is not."""
        if self.cache not in folder.parents:
            self._refuse_unreadable(folder)
            return
        for parent in folder.parents:
            if self.cache in parent.parents:
                _allow(parent, 0o011)
        if stat.S_IMODE(folder.stat().st_mode) & 0o055 == 0o055:
            return
        for path, folders, files in os.walk(folder, topdown=False):  # the folder itself comes last
            for name in (*folders, *files):
                _allow(Path(path, name), 0o044)
        _allow(folder, 0o044)

    def _refuse_unreadable(self, folder: Path) -> None:
        argv = [sys.executable, "-I", "-c", _READS, str(folder), *map(str, folder.glob("*"))]
        run = subprocess.run(argv, cwd="/", env={}, capture_output=True, text=True, **as_user(self))
        if run.returncode or run.stdout.strip():
            raise ModelUnavailable(
                f"{self.name}, as which engines run here ({VARIABLE}), cannot read {run.stdout.strip() or folder}: make the "
                f"model readable for it, and every folder above it passable (chmod -R o+rX {folder})."
            )


def as_user(user: EngineUser | None) -> dict[str, Any]:
    """Arguments of `subprocess.Popen`. None: the agent's own user."""
    if user is None:
        return {}
    return {"user": user.uid, "group": user.gid, "extra_groups": list(user.groups), "umask": 0o077}


def temporary_folder(user: EngineUser | None) -> str:
    """A new one, for that user alone."""
    folder = tempfile.mkdtemp(prefix="tandem-engine-")
    if user is not None:
        os.chown(folder, user.uid, user.gid, follow_symlinks=False)
    return folder


def read_made(path: Path, user: EngineUser, *, most: int) -> bytes:
    """A file that this user has made: no link, no pipe, nobody else's. Raises `OSError`, `ValueError`."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        seen = os.fstat(file.fileno())
        if not stat.S_ISREG(seen.st_mode) or seen.st_uid != user.uid:
            raise ValueError(f"{path} is not a file of {user.name}")
        if len(data := file.read(most + 1)) > most:
            raise ValueError(f"{path} is larger than {most >> 20} MiB")
        return data


def find(text: str, cache: Path) -> EngineUser:
    """By name or number. Raises `InvalidInput`."""
    try:
        entry = pwd.getpwuid(int(text)) if text.isdecimal() else pwd.getpwnam(text)
        name, uid, gid = entry.pw_name, entry.pw_uid, entry.pw_gid
    except KeyError:
        if not text.isdecimal():
            raise InvalidInput(
                f"{VARIABLE}: this machine has no user {text}; make it: useradd --system {text}", field=VARIABLE
            ) from None
        name, uid, gid = text, int(text), int(text)
    if uid == 0:
        raise InvalidInput(f"{VARIABLE}: {text} is root, who may read everything; name another user", field=VARIABLE)
    groups = {gid, *os.getgrouplist(name, gid)}
    groups |= {group.gr_gid for group in grp.getgrall() if group.gr_name in DEVICE_GROUPS}
    return EngineUser(name, uid, gid, tuple(sorted(groups)), cache)


def name_of(user: EngineUser | None) -> str:
    """For people. None: the agent's own user."""
    if user is not None:
        return user.name
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def chosen(config: Config) -> EngineUser | None:
    """The user of this agent's engines, tried out. None: the agent's own. Raises `InvalidInput`: a sentence with the remedy."""
    if not config.engine_user:
        return None
    if os.geteuid() != 0:
        raise InvalidInput(
            f"{VARIABLE}: only an agent that runs as root can start engines as another user; unset it, and they run as this "
            "agent's user.",
            field=VARIABLE,
        )
    user = find(config.engine_user, config.cache_path())
    check(user, python=Path(sys.executable), state=config.home_path())
    return user


def warn_of_root(user: EngineUser | None) -> None:
    """Log what it means that engines run as root, if they do. `user`: theirs; None: the agent's own."""
    if user is None and os.geteuid() == 0:
        log.warning(
            "Engines run as root, as this agent does: the code of a model that an admin trusts can read everything here, "
            "the state folder included. Run the agent as another user, or set %s.",
            VARIABLE,
        )


def check(user: EngineUser, *, python: Path, state: Path, starts: str = STARTS) -> None:
    """Tries, as that user, what its engines will do and what they must not. Raises `InvalidInput`."""
    try:
        user.make_home()
        found, visible = _probe(user, python, state, starts)
    except PermissionError as error:
        if error.errno == errno.EPERM:
            raise _refused(
                "root may not become another user here; give this container the capabilities CHOWN, SETUID and SETGID."
            ) from None
        if error.filename != str(python):
            raise _refused(f"{error.filename or user.cache}: {error.strerror}") from None
        raise _refused(
            f"{user.name} cannot execute {python.resolve()}: install Tandem in a folder that every user can enter, with a "
            "Python that every user can execute (make product PYTHON=/usr/bin/python3), and set TANDEM_CACHE to a folder that "
            "every user can enter, such as /var/cache/tandem."
        ) from None
    except OSError as error:
        raise _refused(f"{error.filename or python}: {error.strerror}") from None
    if not visible:
        raise _refused(
            "root may not see here in which folders another user's processes work, so no engine could be ended for sure; give "
            "this container the capability SYS_PTRACE."
        )
    if found["temporary"]:
        raise _refused(
            f"{user.name} cannot use a temporary folder in {tempfile.gettempdir()} ({found['temporary']}); set TMPDIR to a "
            "folder that every user can enter, such as /tmp."
        )
    if not found["entered"]:
        raise _refused(
            f"{user.name} cannot enter the cache {user.cache}; set TANDEM_CACHE to a folder that every user can enter, such as "
            "/var/cache/tandem."
        )
    if found["secret"]:
        raise _refused(f"{user.name} can enter the state folder {state}; make it root's alone (chown root, chmod 700).")
    if found["written"]:
        raise _refused(
            f"{user.name} can write in {found['written'][0]}, from which this agent runs code as root; make it root's alone, or "
            "let the agent itself run as that user."
        )


def _probe(user: EngineUser, python: Path, state: Path, starts: str) -> tuple[dict[str, Any], bool]:
    """What it found, and whether the agent sees in which folder it works."""
    cached = [path for pattern in ("*", "runtimes/*", "models/*") for path in user.cache.glob(pattern)]
    asked = {
        "enter": [str(user.home)],
        "secret": [str(state)],
        "keep": [str(path) for path in (CHECKOUT, CHECKOUT / "workers", user.cache, *cached)],
    }
    folder = temporary_folder(user)
    try:
        with subprocess.Popen(
            [str(python), "-I", "-c", _PROBE, starts, json.dumps(asked)],
            cwd="/",
            env={"TMPDIR": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **as_user(user),
        ) as process:
            try:
                visible = os.readlink(f"/proc/{process.pid}/cwd") == "/"
            except OSError:
                visible = False
            try:
                said, complained = process.communicate(timeout=CHECK_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise _refused(f"{python}, as {user.name}, gives no answer.") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        found: dict[str, Any] = json.loads(said)
    except ValueError:
        last = (complained.decode(errors="replace").strip().splitlines() or ["it gave no reason"])[-1]
        raise _refused(
            f"{user.name} cannot run Tandem of {CHECKOUT} ({last:.200}); make it readable: chmod -R go+rX {CHECKOUT}"
        ) from None
    return found, visible


def _refused(sentence: str) -> InvalidInput:
    return InvalidInput(f"{VARIABLE}: {sentence}", field=VARIABLE)


def _make_passable(folder: Path) -> None:
    """Makes it and what is missing above it, so that others may pass."""
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(exist_ok=True)
        missing.chmod(0o711)


def _allow(path: Path, bits: int) -> None:
    """Adds these bits to a file or folder; where others may read it they may also enter or execute it, if its owner may."""
    seen = path.lstat()
    if stat.S_ISLNK(seen.st_mode):
        return
    if bits & 0o044 and seen.st_mode & 0o100:
        bits |= 0o011
    if seen.st_mode & bits != bits:
        path.chmod(stat.S_IMODE(seen.st_mode) | bits)
