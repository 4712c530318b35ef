"""The state folder: modes, the lock, and refusals that say what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from controlplane.fleet.errors import Conflict, InvalidInput
from controlplane.up.state import StateFolder


def test_everything_in_it_is_the_owners_alone(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "home")
    state.prepare()
    state.write(state.demo_key, "tdm-secret")
    state.lock()
    folders = [path for path in state.home.rglob("*") if path.is_dir()]
    files = [path for path in state.home.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in [state.home, *folders]} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    state.unlock()


def test_a_folder_that_was_open_to_others_is_closed(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o755)
    StateFolder(tmp_path / "home").prepare()
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700


def test_a_second_make_up_of_the_same_folder_is_told_who_has_it(tmp_path: Path) -> None:
    first, second = StateFolder(tmp_path / "home"), StateFolder(tmp_path / "home")
    first.prepare()
    first.lock()
    with pytest.raises(Conflict, match=rf"already runs on .*process {os.getpid()}\).*TANDEM_HOME"):
        second.lock()
    first.unlock()
    second.lock()
    assert second.locked
    second.unlock()


def test_the_lock_ends_with_its_process_and_is_not_inherited(tmp_path: Path) -> None:
    """A killed `make up` leaves programs running; they must not hold its lock."""
    script = (
        "import os, subprocess, sys; from pathlib import Path; from controlplane.up.state import StateFolder\n"
        f"s = StateFolder(Path({str(tmp_path / 'home')!r})); s.prepare(); s.lock()\n"
        "print(subprocess.Popen(['sleep', '60'], close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    child = int(done.stdout)
    try:
        state = StateFolder(tmp_path / "home")
        state.lock()
        state.unlock()
    finally:
        os.kill(child, 9)


def test_a_lock_on_a_removed_folder_is_none(tmp_path: Path) -> None:
    """Else two would believe to be the one, and end each other's programs."""
    first, second = StateFolder(tmp_path / "home"), StateFolder(tmp_path / "home")
    first.prepare()
    first.lock()
    assert first.locked
    shutil.rmtree(tmp_path / "home")
    assert not first.locked
    second.prepare()
    second.lock()
    assert second.locked
    assert not first.locked
    first.unlock()
    second.unlock()


def test_a_write_replaces_whole_files(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "home")
    state.prepare()
    state.write(state.demo_key, "one")
    state.write(state.demo_key, "two")
    assert state.read(state.demo_key) == "two"
    assert [p.name for p in state.secrets.iterdir()] == ["demo_key"]
    assert state.read(state.manage_key) == ""


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"TANDEM_HOME: .* choose a folder whose path is shorter") as refusal:
        StateFolder(tmp_path / ("x" * 100)).prepare()
    assert refusal.value.field == "TANDEM_HOME"


@pytest.mark.parametrize("name", ["a;b", "a #b", 'a"b', "a\\b", "100%", "a\nb"])
def test_a_path_that_breaks_configuration_files_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="choose another path"):
        StateFolder(tmp_path / name).prepare()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(InvalidInput, match=r"cannot be used: Not a directory.* set TANDEM_HOME"):
        StateFolder(tmp_path / "file" / "home").prepare()
