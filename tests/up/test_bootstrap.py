"""The checkout's virtual environment: made, refused with a sentence, and made anew after an interruption."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of nothing but a project that needs no package and no network."""
    folder = tmp_path / "checkout"
    (folder / "controlplane" / "up").mkdir(parents=True)
    shutil.copy(ROOT / "controlplane" / "up" / "bootstrap.py", folder / "controlplane" / "up")
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "constraints.txt").write_text("")
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n[project]\nname = "nothing"\nversion = "1"\n'
    )
    (folder / "backend.py").write_text(
        "import base64, hashlib, zipfile\n"
        "def build_editable(folder, config_settings=None, metadata_directory=None):\n"
        "    name = 'nothing-1-py3-none-any.whl'\n"
        "    with zipfile.ZipFile(f'{folder}/{name}', 'w') as wheel:\n"
        "        wheel.writestr('nothing-1.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: nothing\\nVersion: 1\\n')\n"
        "        wheel.writestr('nothing-1.dist-info/WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')\n"
        "        wheel.writestr('nothing-1.dist-info/RECORD', '')\n"
        "    return name\n"
        "build_wheel = build_editable\n"
    )
    return folder


def environment() -> dict[str, str]:
    """Without what the make that runs this suite hands down."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE", "PYTHON", "MFLAGS"))
    }


def bootstrap(checkout: Path) -> subprocess.CompletedProcess[str]:
    env = environment() | {"PIP_NO_INDEX": "1"}
    script = checkout / "controlplane" / "up" / "bootstrap.py"
    return subprocess.run([sys.executable, script], capture_output=True, text=True, env=env, check=False)


def test_from_nothing_then_warm_then_after_an_interruption(checkout: Path) -> None:
    first = bootstrap(checkout)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "Making the virtual environment" in first.stdout
    stamp = checkout / ".venv" / ".tandem-installed-product"
    assert stamp.is_file()

    warm = bootstrap(checkout)
    assert (warm.returncode, warm.stdout) == (0, "")

    working = (checkout / "pyproject.toml").read_text()
    (checkout / "pyproject.toml").write_text(working.replace('"backend"', '"no_such_backend"'))
    broken = bootstrap(checkout)
    assert broken.returncode == 1
    assert "could not be installed. Without network, point PIP_INDEX_URL at a mirror" in broken.stderr

    (checkout / ".venv" / "left-behind").touch()
    (checkout / "pyproject.toml").write_text(working)
    again = bootstrap(checkout)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "Making the virtual environment" in again.stdout  # the half-done one was not trusted
    assert not (checkout / ".venv" / "left-behind").exists()
    assert stamp.is_file()


@pytest.mark.parametrize(
    ("python", "sentence"),
    [
        ("false", "is older or does not run: name another one, make product PYTHON="),
        ("/no/such/python", "is older or does not run: name another one, make product PYTHON="),
        ("", "found none: install it"),
    ],
)
def test_a_missing_or_old_python_is_a_sentence(python: str, sentence: str, checkout: Path) -> None:
    done = subprocess.run(
        ["make", "product", f"PYTHON={python}"], cwd=checkout, capture_output=True, text=True, check=False,
        env=environment(),
    )  # fmt: skip
    assert done.returncode != 0
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert not (checkout / ".venv").exists()


def test_make_alone_lists_the_commands(checkout: Path) -> None:
    done = subprocess.run(["make"], cwd=checkout, capture_output=True, text=True, check=True, env=environment())
    assert [line.split()[1] for line in done.stdout.splitlines()] == [
        "help", "up", "test", "check", "bench", "soak", "clean", "product",
    ]  # fmt: skip
