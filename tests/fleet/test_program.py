"""No program shows a trace or a secret, whatever its environment: one sentence that names what is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {
    "tandem": ["-m", "controlplane.cli", "get", "nodes"],
    "bench": ["-m", "controlplane.cli", "bench", "prefixes"],
    "make up": ["-m", "controlplane.up"],
    "web": ["-m", "controlplane.web"],
    "manage.py": ["manage.py", "createkey", "--name", "x", "--scope", "inference"],
    "agent": ["-m", "workers"],
    "router": ["-m", "frontend_api"],
    "build": ["-m", "frontend_api.build", "--if-possible"],
}


def run(arguments: list[str], tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    own = {"TANDEM_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path), "RUNTIME": "sim"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | own | env, capture_output=True, text=True, timeout=60,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_setting_that_cannot_work_ends_every_program_with_a_sentence(name: str, tmp_path: Path) -> None:
    done = run(PROGRAMS[name], tmp_path, REDIS_URL="redis://:hush/hush@127.0.0.1:6379/0")
    assert done.returncode in (1, 2)
    (line,) = (done.stdout + done.stderr).splitlines()
    assert "REDIS_URL: " in line
    assert "/ as %2F" in line
    assert "hush" not in line


@pytest.mark.parametrize("name", ["web", "manage.py", "agent", "make up"])
def test_a_state_folder_that_cannot_be_made_is_named(name: str, tmp_path: Path) -> None:
    done = run(PROGRAMS[name], tmp_path, TANDEM_HOME="/proc/nothing")
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert "TANDEM_HOME: /proc/nothing cannot be used: No such file or directory" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "TANDEM_HOME: the database has not been prepared"),
        ("postgres://u:hush@127.0.0.1:1/d", "DATABASE_URL: connection failed"),
    ],
)
def test_a_database_that_cannot_be_used_is_a_sentence(url: str, says: str, tmp_path: Path) -> None:
    done = run(PROGRAMS["manage.py"], tmp_path, DATABASE_URL=url)
    assert done.returncode == 1
    assert done.stderr.startswith(f"manage.py: {says}")
    assert "hush" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("raises", "says"),
    [
        ("RuntimeError('hush')", r"x: this is a defect of Tandem \(RuntimeError\)\. The trace is in (\S+)\n"),
        ("OSError(28, 'No space left on device', '/f')", r"x: No space left on device: /f\. The trace is in (\S+)\n"),
        ("InvalidInput('TANDEM_X: write 1')", r"x: TANDEM_X: write 1\n()"),
    ],
)
def test_what_nobody_foresaw_is_a_sentence_and_a_private_file(raises: str, says: str, tmp_path: Path) -> None:
    code = (
        "from controlplane.fleet import program; from controlplane.fleet.errors import InvalidInput; program.begin('x'); "
        f"print('✓ ü'); raise {raises}"
    )
    done = run(["-c", code], tmp_path, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (1, "? ?\n")
    told = re.fullmatch(says, done.stderr)
    assert told, done.stderr
    if told[1]:
        assert "Traceback" in Path(told[1]).read_text()
        assert Path(told[1]).stat().st_mode & 0o077 == 0


def test_a_full_output_is_a_sentence(tmp_path: Path) -> None:
    code = "import sys; from controlplane.cli import commands, main; commands.COMMANDS['get'] = lambda *_: print('x') or 0; sys.exit(main())"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, "get", "nodes"], env=os.environ | {"TANDEM_API_KEY": "tdm-x"}, cwd=ROOT,
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "tandem: No space left on device\n")
