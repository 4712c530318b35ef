"""Engines that a root agent runs as another user: they reach what is theirs, and nothing of the agent's.

The engine is a script of the system's Python: the checkout's own may lie where only root comes.
"""

from __future__ import annotations

import errno
import json
import os
import pwd
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from controlplane.fleet.config import Config
from controlplane.fleet.errors import InvalidInput, ModelUnavailable, RuntimeBroken
from controlplane.fleet.model import Runtime
from tests.workers.conftest import build_sim, no_model, sim_runtime, until
from workers import engine_user, tokenizer_folder
from workers.command import Command
from workers.engine_user import EngineUser, chosen, find
from workers.launch import Launcher
from workers.process import EngineProcess, boot_id, members, sweep
from workers.record import LOG, Records, write_private
from workers.runtimes import EngineRuntime
from workers.tokenizer_folder import Tokenizer

PYTHON = Path("/usr/bin/python3")
HELD = int(Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0], 16)
NEEDED = {"CHOWN": 0, "SETGID": 6, "SETUID": 7, "SYS_PTRACE": 19}
as_root = pytest.mark.skipif(
    not (all(HELD >> bit & 1 for bit in NEEDED.values()) and PYTHON.exists()),
    reason=f"only root starts processes as another user, with {', '.join(NEEDED)} and {PYTHON}",
)


@pytest.fixture
def user() -> Iterator[EngineUser]:
    """`nobody`, with a cache that it may pass through: pytest's folders are root's alone."""
    cache = Path(tempfile.mkdtemp(prefix="tandem-cache-"))
    one = find("nobody", cache)
    one.make_home()
    yield one
    shutil.rmtree(cache)


ATTACKER = """
import json, os, sys, tempfile, time
targets, written = json.loads(sys.argv[1])
got = {}
for path in targets:
    try: got[path] = open(path, "rb").read(100).decode(errors="replace")
    except OSError as error: got[path] = type(error).__name__
for path in written:
    with open(path + "/made", "w") as file: file.write("mine")
with open("relative", "w") as file: file.write("mine")
tempfile.NamedTemporaryFile().close()
print(json.dumps({
    "got": got, "ids": [os.getresuid(), os.getresgid(), os.getgroups()], "umask": os.umask(0), "home": os.environ["HOME"],
    "user": os.environ["USER"], "environment": sorted(os.environ), "descriptors": sorted(os.listdir("/proc/self/fd")),
}), flush=True)
if os.fork() == 0: os.execv("/usr/bin/sleep", ["sleep", "600"])
time.sleep(600)
"""


@as_root
def test_an_engine_reads_no_secret_of_the_agent_and_is_adopted_and_ended(
    user: EngineUser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    records = Records(home / "agents" / "x" / "engines")
    monkeypatch.setenv("TANDEM_SECRET_KEY", "hush")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/0")
    secrets = [home / "secret_key", home / "agents" / "x" / "node.json", records.folder("other", 1) / "engine.json"]
    secrets.append(records.folder("other", 1) / LOG)
    for path in secrets:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, b"hush")
        path.chmod(0o644)  # also where a file is wide, the way to it is closed
    home.chmod(0o700)
    folder = records.folder("d", 1)
    targets = [*map(str, secrets), f"/proc/{os.getpid()}/environ", "/proc/self/fd/1", str(folder / LOG), "/etc/shadow"]
    asked = json.dumps([targets, [str(user.home)]])
    process = EngineProcess.launch((str(PYTHON), "-c", ATTACKER, asked), {"VLLM_API_KEY": "k"}, folder, user=user)
    temporary = (folder / "tmp").resolve()
    try:
        until(lambda: (folder / LOG).read_bytes().endswith(b"\n"))
        seen = json.loads((folder / LOG).read_text())
        assert seen["got"] == dict.fromkeys(targets, "PermissionError")
        uids, gids, groups = seen["ids"]
        assert (set(uids), set(gids)) == ({user.uid}, {user.gid})
        assert set(groups) == set(user.groups)
        assert 0 not in groups
        assert (seen["umask"], seen["home"], seen["user"]) == (0o077, str(user.home), "nobody")
        assert not {"TANDEM_SECRET_KEY", "XDG_RUNTIME_DIR"} & set(seen["environment"])
        assert (user.home / "made").read_text() == (temporary / "relative").read_text() == "mine"

        until(lambda: len(members(folder)) == 2)
        assert process.pid in members(folder)
        adopted = EngineProcess.adopt(process.pid, process.ticks, boot_id(), folder)
        assert adopted
        assert adopted.running()
        helper = next(pid for pid in members(folder) if pid != process.pid)
        os.kill(process.pid, 9)
        until(lambda: not process.running())
        assert members(folder) == [helper]
    finally:
        process.kill()
        sweep(folder)
    assert members(folder) == []
    assert not psutil.pid_exists(helper) or psutil.Process(helper).status() == psutil.STATUS_ZOMBIE
    assert not temporary.exists()


def read_as(user: EngineUser, path: Path) -> str:
    run = psutil.Popen(
        [str(PYTHON), "-I", "-c", "import sys; print(open(sys.argv[1]).read())", str(path)],
        cwd="/", stdout=-1, stderr=-1, text=True, **engine_user.as_user(user),
    )  # fmt: skip
    said, complained = run.communicate()
    return str(said).strip() or str(complained).splitlines()[-1].partition(":")[0]


@as_root
def test_what_lies_in_the_cache_is_made_readable_and_nothing_else_of_it(user: EngineUser) -> None:
    before = os.umask(0o077)
    try:
        for name in ("models/m/weights/w", "models/other/w", "models/m.log", "runtimes/r/bin/python"):
            path = user.cache / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
        (user.cache / "runtimes/r/bin/python").chmod(0o700)
        (user.cache / "models/m/out").symlink_to(user.cache / "models/other/w")
    finally:
        os.umask(before)
    for made in ("models/m", "runtimes/r"):
        user.let_read(user.cache / made)
    assert read_as(user, user.cache / "models/m/weights/w") == "models/m/weights/w"
    for hidden in ("models/other/w", "models/m/out", "models/m.log"):
        assert read_as(user, user.cache / hidden) == "PermissionError", hidden
    assert (user.cache / "runtimes/r/bin/python").stat().st_mode & 0o777 == 0o755
    assert not [path for path in user.cache.rglob("*") if path.lstat().st_mode & 0o022 and not path.is_symlink()]


@as_root
def test_a_model_elsewhere_that_it_cannot_read_is_named(
    user: EngineUser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(PYTHON))
    shared = Path(tempfile.mkdtemp(prefix="tandem-model-"))
    try:
        (shared / "config.json").write_text("{}")
        shared.chmod(0o755)
        user.let_read(shared)
        (shared / "config.json").chmod(0o600)
        with pytest.raises(ModelUnavailable, match=f"nobody.* cannot read {shared}/config.json: .*chmod"):
            user.let_read(shared)
        assert (shared / "config.json").stat().st_mode & 0o777 == 0o600, "it is not ours to change"
    finally:
        shutil.rmtree(shared)
    with pytest.raises(ModelUnavailable, match="cannot read"):
        user.let_read(tmp_path)


FORGES = """#!/bin/sh
[ "$(id -un)" = nobody ] || exit 1
cd "$4" && echo "{}" > tokenizer_config.json
ln -s "$SECRET" tokenizer.json
"""


@as_root
def test_the_code_of_a_models_tokenizer_runs_as_that_user_and_lends_no_file_of_roots(
    user: EngineUser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent copies what it wrote: a link must not be followed."""
    (secret := tmp_path / "secret").write_text('{"hush": 1}')
    secret.chmod(0o600)
    monkeypatch.setenv("SECRET", str(secret))
    monkeypatch.setattr(tokenizer_folder, "_SCRIPT", Path("/dev/null"))
    python = user.cache / "python"
    (model := tmp_path / "model").mkdir()
    honest = FORGES.replace('ln -s "$SECRET" tokenizer.json', "echo '{\"its\": 1}' > tokenizer.json")
    for code, expected in ((FORGES, ""), (honest, '{"its": 1}\n')):
        python.write_text(code)
        python.chmod(0o755)
        made = tokenizer_folder.ensure(
            model,
            ("--trust-remote-code",),
            runtime=EngineRuntime(kind=Runtime.CPU, python=python, version="1"),
            cache=user.cache,
            progress=lambda sentence, done: None,
            user=user,
        )
        assert bool(made.digest) == bool(expected)
        if expected:
            assert (made.folder / "tokenizer.json").read_text() == expected
    found = [path.read_bytes() for path in user.cache.rglob("*") if path.is_file() and path.suffix == ".json"]
    assert b'{"hush": 1}' not in found
    assert not list(Path(tempfile.gettempdir()).glob("tandem-engine-*/tokenizer_config.json"))


def refuse(*asked: object, **more: object) -> NoReturn:
    raise PermissionError(errno.EPERM, "Operation not permitted", str(PYTHON))


@as_root
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("", ""),
        ("python", r"cannot execute /.*python3.*make product PYTHON=/usr/bin/python3.*TANDEM_CACHE"),
        ("checkout", r"cannot run Tandem of .*No module named 'nothing_of_this_name'.*chmod -R go\+rX"),
        ("cache", "cannot enter the cache .*set TANDEM_CACHE"),
        ("state", "can enter the state folder .*chmod 700"),
        ("temporary", "cannot use a temporary folder .*set TMPDIR"),
        ("blind", "may not see here in which folders .* work.*capability SYS_PTRACE"),
        ("bound", "may not become another user here; give this container the capabilities"),
        ("theirs", "can write in .*/runtimes.*root's alone"),
    ],
)
def test_what_would_not_work_or_not_protect_is_told_before_anything_starts(
    wrong: str, says: str, user: EngineUser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, state = PYTHON, tmp_path
    (user.cache / "runtimes").mkdir()
    if wrong == "python":
        (python := tmp_path / "python").symlink_to(PYTHON)
    if wrong == "cache":
        user = find("nobody", tmp_path / "cache")
    if wrong == "state":
        state = user.cache
    if wrong == "temporary":
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if wrong == "theirs":
        shutil.chown(user.cache / "runtimes", user.uid)
    if wrong == "blind":
        monkeypatch.setattr(os, "readlink", refuse)
    if wrong == "bound":
        monkeypatch.setattr(subprocess, "Popen", refuse)
    starts = "nothing_of_this_name" if wrong == "checkout" else "json"
    if not wrong:
        engine_user.check(user, python=python, state=state, starts=starts)
        return
    with pytest.raises(InvalidInput, match=says) as refused:
        engine_user.check(user, python=python, state=state, starts=starts)
    assert refused.value.message.startswith("TANDEM_ENGINE_USER: ")
    assert len(refused.value.message.splitlines()) == 1


@as_root
def test_a_runtime_that_it_cannot_execute_is_named(user: EngineUser, tmp_path: Path) -> None:
    launcher = Launcher(
        address="127.0.0.1",
        span=(23000, 23003),
        ensure_runtime=sim_runtime,
        ensure_model=no_model,
        ensure_tokenizer=lambda model, arguments, *, runtime, progress: Tokenizer(model, ""),
        build=build_sim,
        chance=random.Random(),
        user=user,
    )
    python = user.cache / "runtimes" / "r" / "bin" / "python"
    python.parent.mkdir(parents=True)
    (tmp_path / "python").symlink_to(PYTHON)
    python.symlink_to(tmp_path / "python")
    tmp_path.chmod(0o700)
    with pytest.raises(RuntimeBroken, match=f"nobody.* cannot execute /.*; remove the folder {user.cache}/runtimes/r,"):
        launcher.start(Command((str(python),), {}), tmp_path / "attempt")
    assert not os.path.lexists(tmp_path / "attempt" / "tmp")


def test_an_agent_that_is_not_root_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(InvalidInput, match="only an agent that runs as root"):
        chosen(Config(engine_user="nobody"))
    assert chosen(Config()) is None


def test_root_without_the_setting_is_warned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert chosen(Config()) is None
    engine_user.warn_of_root(None)
    (warning,) = caplog.messages
    assert "set TANDEM_ENGINE_USER" in warning


def test_users_are_found_by_name_or_number(tmp_path: Path) -> None:
    named = find("nobody", tmp_path)
    assert find(str(named.uid), tmp_path) == named
    assert named.gid in named.groups
    assert engine_user.name_of(named) == "nobody"
    assert engine_user.name_of(None) == pwd.getpwuid(os.geteuid()).pw_name
    unknown = find("4000123", tmp_path)
    assert (unknown.name, unknown.uid, unknown.gid) == ("4000123", 4000123, 4000123)
    with pytest.raises(InvalidInput, match="no user nobody-of-this-name; make it: useradd"):
        find("nobody-of-this-name", tmp_path)
