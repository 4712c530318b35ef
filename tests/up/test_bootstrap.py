"""The checkout's virtual environment: made, refused with a sentence, and made anew after an interruption."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

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


def bootstrap(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = environment() | {"PIP_NO_INDEX": "1"}
    script = checkout / "controlplane" / "up" / "bootstrap.py"
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, env=env, check=False)


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

    (checkout / ".venv" / "pyvenv.cfg").unlink()  # a removal that was interrupted
    (checkout / ".venv.old-1" / "bin").mkdir(parents=True)
    whole = bootstrap(checkout)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert [path.name for path in checkout.glob(".venv*")] == [".venv"]
    assert bootstrap(checkout, "--this-python").stdout == ""


@pytest.fixture
def module(tmp_path: Path) -> ModuleType:
    """The script, for an environment that looks whole and says that this Python made it."""
    spec = importlib.util.spec_from_file_location("bootstrap_of_test", ROOT / "controlplane" / "up" / "bootstrap.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    venv = tmp_path / ".venv"
    found.CHECKOUT, found.VENV, found.UNFINISHED = tmp_path, venv, venv / ".tandem-unfinished"
    (venv / "bin").mkdir(parents=True)
    (venv / "lib" / "python3.11" / "site-packages" / "nothing").mkdir(parents=True)
    (venv / "pyvenv.cfg").write_text(f"command = python -m venv {venv}\n")
    say(found, *sys.version_info[:3], sys.base_prefix)
    (venv / ".tandem-installed-product").write_text("digest\nnothing")
    return found


def say(module: ModuleType, *of: object) -> None:
    python = module.VENV / "bin" / "python"
    python.write_text(f"#!/bin/sh\necho True {' '.join(map(str, of))}\n")
    python.chmod(0o755)


def test_an_environment_that_is_whole_is_used(module: ModuleType) -> None:
    assert module._usable(False)
    assert module._usable(True)


def test_what_another_python_made_is_used_unless_this_one_was_asked_for(
    module: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    say(module, 3, 12, 1, "/elsewhere with spaces")
    assert module._usable(False)
    assert not module._usable(True)
    assert "is of Python 3.12.1 in /elsewhere with spaces; another one was asked for" in capsys.readouterr().out


@pytest.mark.parametrize(
    "gone",
    ["pyvenv.cfg", "bin/python", "bin", "lib/python3.11/site-packages/nothing", "lib", ""],
    ids=lambda name: name or "all",
)
def test_what_an_interrupted_removal_left_is_not_used(gone: str, module: ModuleType) -> None:
    path = module.VENV / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert not module._usable(False)


@pytest.mark.parametrize("there", ["unfinished", "moved", "old", "no program", "a file"])
def test_what_cannot_be_trusted_is_not_used(there: str, module: ModuleType) -> None:
    if there == "unfinished":
        module.UNFINISHED.touch()
    elif there == "moved":
        (module.VENV / "pyvenv.cfg").write_text("command = python -m venv /elsewhere/.venv\n")
    elif there == "old":
        (module.VENV / "bin" / "python").write_text("#!/bin/sh\necho False 3 9 1 /usr\n")
    elif there == "no program":
        (module.VENV / "bin" / "python").write_bytes(b"\x7fELF")
    else:
        shutil.rmtree(module.VENV)
        module.VENV.touch()
    assert not module._usable(False)
    module._discard()
    assert not module.VENV.exists()
    assert not list(module.CHECKOUT.glob(".venv*"))


def test_a_crash_of_pip_is_told_without_its_trace(module: ModuleType) -> None:
    trace = ["Traceback (most recent call last):", '  File "y", line 1', "    z()", "ValueError: no"]
    assert (
        module._told(["Obtaining x", "ERROR: Exception:", *trace]) == "Obtaining x\nERROR: Exception:\nValueError: no"
    )


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device", "/x/.venv"), PermissionError(13, "no", "/x/.venv")]
)
def test_what_the_disk_refuses_is_a_sentence(error: OSError, checkout: Path) -> None:
    code = (
        "import errno, sys; sys.argv = sys.argv[1:]; from pathlib import Path\n"
        f"def refuse(*_, **__): raise {type(error).__name__}{error.errno, error.strerror, error.filename}\n"
        "Path.mkdir = refuse\n"
        "exec(compile(Path(sys.argv[0]).read_text(), sys.argv[0], 'exec'), {'__name__': '__main__', '__file__': sys.argv[0]})\n"
    )
    script = checkout / "controlplane" / "up" / "bootstrap.py"
    done = subprocess.run([sys.executable, "-c", code, script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("/x/.venv: ")
    assert len(done.stderr.splitlines()) == 1


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
