"""The compiled router: what may be compiled, how it is made and kept, and that it serves as the uncompiled one does."""

from __future__ import annotations

import ast
import asyncio
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import tomllib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from controlplane.fleet import config
from frontend_api import build, compiled
from tests.frontend_api.client import PROMPT, ask
from tests.frontend_api.scripted import ScriptedEngine
from tests.frontend_api.test_process import CHAT, Program

ROOT = Path(__file__).parents[2]
NAMES = {f"frontend_api.{module}" for module in compiled.MODULES}


def tree(name: str) -> ast.Module:
    return ast.parse((ROOT / (name.replace(".", "/") + ".py")).read_text())


def classes(name: str) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree(name)) if isinstance(node, ast.ClassDef))


@pytest.mark.parametrize("name", sorted(NAMES))
def test_what_is_compiled_needs_no_class_keywords_and_no_struct(name: str) -> None:
    """The compiler drops a class's keywords, and msgspec has to make its classes itself."""
    assert not [found.name for found in classes(name) if found.keywords]
    module = importlib.import_module(name)
    own = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == name]
    assert not [found for found in own if issubclass(found, msgspec.Struct)]


def test_no_compiled_class_has_an_uncompiled_heir() -> None:
    """Such a class definition fails when it is run."""
    files = [file.relative_to(ROOT).with_suffix("") for file in compiled.PACKAGE.rglob("*.py")]
    for name in {".".join(file.parts) for file in files} - NAMES:
        foreign = set()
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if node.module in NAMES or f"{node.module}.{alias.name}" in NAMES:
                        foreign.add(alias.asname or alias.name)
        for found in classes(name):
            bases = {node.id for base in found.bases for node in ast.walk(base) if isinstance(node, ast.Name)}
            assert not bases & foreign, f"{name}.{found.name}"


def test_the_compiler_is_the_pinned_one() -> None:
    assert compiled.COMPILER in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of what the compiler is given."""
    build._copy(tmp_path / "source")
    return tmp_path / "source"


def test_a_folder_is_named_by_its_source(source: Path, tmp_path: Path) -> None:
    def name() -> str:
        return compiled.folder(tmp_path, source).name

    first = name()
    assert compiled.folder(tmp_path / "other cache").name == first  # the place of checkout and cache is nothing to it
    for untouched in ("controlplane/settings.py", "frontend_api/notes.txt", "tests/test_x.py"):
        (source / untouched).parent.mkdir(exist_ok=True)
        (source / untouched).write_text("x")
    (source / "frontend_api" / ".#gate.py").symlink_to("an-editor@lies.here")
    assert name() == first
    seen = {first}
    for file in sorted([*source.glob("frontend_api/**/*.py"), *source.glob("controlplane/fleet/*.py")]):
        if not file.is_symlink():
            file.write_text(file.read_text() + "\n")
            assert name() not in seen, file
            seen.add(name())
    (source / "frontend_api" / "gate.py").rename(source / "frontend_api" / "fence.py")
    assert name() not in seen


def pretend(source: Path) -> Path:
    """As `build._compile`, in no time."""
    for file in compiled.files(source / "made").values():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return source / "made"


def test_what_was_compiled_stays_and_half_of_it_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_compile", pretend)
    made = build.build(tmp_path)
    assert made == compiled.folder(tmp_path)
    assert compiled.whole(made)
    monkeypatch.setattr(build, "_check", lambda: pytest.fail("needs nothing where it is done"))
    (made.parent / "lock").unlink()
    assert build.build(tmp_path) == made
    assert not (made.parent / "lock").exists()  # as in the cache of another user
    monkeypatch.undo()
    monkeypatch.setattr(build, "_compile", pretend)
    next(iter(compiled.files(made).values())).unlink()
    assert compiled.whole(build.build(tmp_path))


def test_a_source_saved_meanwhile_has_its_own_folder(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = compiled.folder(tmp_path)
    (source / "frontend_api" / "gate.py").write_text("x")
    monkeypatch.setattr(build, "_compile", pretend)
    monkeypatch.setattr(compiled, "PACKAGE", source / "frontend_api")
    assert build.build(tmp_path) == compiled.folder(tmp_path, source) != before
    assert not before.exists()


def test_the_second_of_two_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    begun, go_on, calls = threading.Event(), threading.Event(), []

    def slowly(source: Path) -> Path:
        calls.append(source)
        begun.set()
        go_on.wait(20)
        return pretend(source)

    monkeypatch.setattr(build, "_compile", slowly)
    made: list[Path] = []
    two = [threading.Thread(target=lambda: made.append(build.build(tmp_path))) for _ in range(2)]
    two[0].start()
    assert begun.wait(20)
    two[1].start()
    said = ""
    while "waiting for it" not in said:
        said += capfd.readouterr().out
        time.sleep(0.01)
    assert not made
    go_on.set()
    for thread in two:
        thread.join(20)
    assert made == [compiled.folder(tmp_path)] * 2
    assert len(calls) == 1


def test_old_ones_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(build.KEPT + 2):
        old = tmp_path / "router" / f"old-{number}"
        old.mkdir(parents=True)
        os.utime(old, (number, number))
    monkeypatch.setattr(build, "_compile", pretend)
    made = build.build(tmp_path)
    names = {f"old-{number}" for number in range(3, build.KEPT + 2)}
    assert {path.name for path in made.parent.iterdir()} == {made.name, "lock", *names}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"PATH": "/nowhere"}, "There is no C compiler: install "),
        ({"CC": "nocc -x"}, "There is no C compiler: install nocc."),
        ({"CC": "no-linux-gnu-gcc -x"}, "There is no C compiler: install gcc."),
        ({"TANDEM_CACHE": "/proc/cache"}, "No such file or directory: /proc/cache"),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, environment: dict[str, str], says: str) -> None:
    environment = {"TANDEM_CACHE": str(tmp_path), **environment}
    for arguments, more, code in (([], {}, 1), (["--if-possible"], {}, 0), (["--if-possible"], {"TANDEM_COMPILED": "always"}, 1)):  # fmt: skip
        done = run("frontend_api.build", *arguments, **environment, **more)
        (line,) = done.stderr.splitlines()
        assert (done.returncode, says in line, "runs uncompiled" in line) == (code, True, code == 0)
    assert run("frontend_api.build", "--if-possible", **environment, TANDEM_COMPILED="never").stderr == ""


def test_missing_headers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(build.Impossible, match=r"header files .* install python3\.\d+-dev"):
        build.build(tmp_path)


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    """The compiler's own files have no room."""
    limited = (
        "import resource as r, sys; r.setrlimit(r.RLIMIT_FSIZE, (40_000,) * 2); sys.argv = ['x']; "
        "from frontend_api import build, compiled; compiled.MODULES = ('limits.windows',); sys.exit(build.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited],
        cwd=ROOT,
        env={**os.environ, "TANDEM_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert re.search(r"could not be compiled\. The compiler failed \(1\):\n.*File too large", done.stderr)
    assert "Traceback" not in done.stderr
    assert [path.name for path in (tmp_path / "router").iterdir()] == ["lock"]


class Building:
    """A real build, in a process group of its own, that has begun."""

    def __init__(self, cache: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "frontend_api.build", "--if-possible"],
            cwd=ROOT,
            env={**os.environ, "TANDEM_CACHE": str(cache)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.children: list[psutil.Process] = []
        while not self.children:
            assert self.process.poll() is None
            self.children = psutil.Process(self.process.pid).children()
            time.sleep(0.01)

    def send(self, number: int, *, group: bool) -> tuple[int, str]:
        (os.killpg if group else os.kill)(self.process.pid, number)
        said = self.process.communicate(timeout=20)[1]
        _, alive = psutil.wait_procs(self.children, timeout=20)
        assert not alive
        return self.process.returncode, said


@pytest.mark.parametrize(
    ("number", "group"),
    [
        pytest.param(signal.SIGINT, True, id="ctrl-c"),
        pytest.param(signal.SIGTERM, False, id="from-make"),
        pytest.param(signal.SIGHUP, False, id="hangup"),
    ],
)
def test_an_interrupted_build_ends_its_compiler(tmp_path: Path, number: int, group: bool) -> None:
    assert Building(tmp_path).send(number, group=group) == (130, "Interrupted. The next build starts clean.\n")
    assert [path.name for path in (tmp_path / "router").iterdir()] == ["lock"]


def test_what_a_killed_build_leaves_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Building(tmp_path).send(signal.SIGKILL, group=True)
    assert list((tmp_path / "router").glob("unfinished-*"))
    assert not compiled.use(tmp_path)
    monkeypatch.setattr(build, "_compile", pretend)
    made = build.build(tmp_path)
    assert {path.name for path in made.parent.iterdir()} == {made.name, "lock"}


@pytest.fixture(scope="module")
def made() -> Path:
    """The user's own, as it takes a minute."""
    return build.build(config.load().cache_path())


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    found = await ScriptedEngine().start()
    yield found
    await found.stop()


Start = Callable[..., Program]


@pytest.fixture
def start(tmp_path: Path, engine: ScriptedEngine) -> Iterator[Start]:
    programs: list[Program] = []

    def begin(*arguments: str, **environment: str) -> Program:
        arguments = ("--no-auth", "--model", "m", "--aggregated", engine.url, *arguments)
        programs.append(Program(tmp_path, *arguments, **environment))
        return programs[-1]

    yield begin
    for program in programs:
        program.kill()


def first_line(program: Program) -> str:
    return program.log.read_text().splitlines()[0]


@pytest.mark.usefixtures("made")
async def test_it_says_that_it_is_compiled_and_answers_the_same(start: Start) -> None:
    usual = await start(TANDEM_COMPILED="always").up()
    other = await start(TANDEM_COMPILED="never").up()
    several = await start("--processes", "3").up()
    assert re.search(r"\(1 process, compiled\)$", first_line(usual))
    assert re.search(r"\(1 process\)$", first_line(other))
    assert re.search(r"\(3 processes, compiled\)$", first_line(several))
    for path, body in (
        (CHAT, PROMPT),
        (CHAT, {**PROMPT, "stream": True}),
        (CHAT, {**PROMPT, "stream": True, "stream_options": {"include_usage": True}}),
        (CHAT, {**PROMPT, "model": "nobody's"}),
        (CHAT, {}),
        ("/v1/completions", {"model": "m", "prompt": "x"}),
        ("/v1/messages", {"max_tokens": 5, **PROMPT}),
        ("/v1/models", None),
        ("/nowhere", None),
    ):
        replies = [await ask(program.port, path, body) for program in (usual, other, several)]
        assert len({(reply.status, frozenset(reply.headers), without_ids(reply.body)) for reply in replies}) == 1, path


def without_ids(body: bytes) -> bytes:
    return re.sub(rb'"(created|id|request_id)":("[^"]*"|\d+)', b"", body)


async def refused(program: Program) -> str:
    assert await program.ended() == 1
    (line,) = program.log.read_text().splitlines()
    return line


async def test_always_asks_for_a_build(start: Start, tmp_path: Path) -> None:
    said = await refused(start(TANDEM_COMPILED="always", TANDEM_CACHE=str(tmp_path / "empty")))
    assert "TANDEM_COMPILED is always: run `python -m frontend_api.build`" in said


async def test_nonsense_is_refused(start: Start) -> None:
    assert "TANDEM_COMPILED: " in await refused(start(TANDEM_COMPILED="yes"))


@pytest.fixture
def own(made: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A cache with percent signs and more in its name, and the compiled modules in it."""
    cache = tmp_path / "a %s cache, ünübertroffen"
    shutil.copytree(made, cache / "router" / made.name)
    return cache, cache / "router" / made.name


async def test_a_cache_may_have_any_name(start: Start, own: tuple[Path, Path]) -> None:
    program = await start(TANDEM_COMPILED="always", TANDEM_CACHE=str(own[0])).up()
    assert (await ask(program.port, CHAT, PROMPT)).status == 200


@pytest.mark.parametrize("name", ["frontend_api.flow", "tandem_router__mypyc"])
async def test_half_of_it_is_not_used(start: Start, own: tuple[Path, Path], name: str) -> None:
    """A module that is not compiled among others that are would crash."""
    compiled.files(own[1])[name].unlink()
    program = await start(TANDEM_CACHE=str(own[0])).up()
    assert "compiled" not in first_line(program)
    assert (await ask(program.port, CHAT, PROMPT)).status == 200
    assert "run `python -m" in await refused(start(TANDEM_CACHE=str(own[0]), TANDEM_COMPILED="always"))


@pytest.mark.parametrize("name", ["frontend_api.gate", "tandem_router__mypyc"])
async def test_what_does_not_load_is_named_and_not_used(start: Start, own: tuple[Path, Path], name: str) -> None:
    compiled.files(own[1])[name].write_bytes(b"")
    program = await start("--processes", "2", TANDEM_CACHE=str(own[0])).up()
    said, line, *_ = program.log.read_text().splitlines()
    assert f"{own[1]} does not load: delete it" in said
    assert line.endswith("(2 processes)")
    assert (await ask(program.port, CHAT, PROMPT)).status == 200
    assert "does not load" in await refused(start(TANDEM_CACHE=str(own[0]), TANDEM_COMPILED="always"))


async def test_a_cache_that_can_be_no_folder_is_refused_by_name(start: Start, tmp_path: Path) -> None:
    (tmp_path / "round").symlink_to(tmp_path / "round")
    for cache in ("/dev/null", str(tmp_path / "round")):
        assert "TANDEM_CACHE: " in await refused(start(TANDEM_CACHE=cache))


async def test_what_is_built_anew_below_a_router_is_nothing_to_it(start: Start, own: tuple[Path, Path]) -> None:
    program = await start("--processes", "2", TANDEM_COMPILED="always", TANDEM_CACHE=str(own[0])).up()
    shutil.rmtree(own[0])
    victim = min(program.children)
    os.kill(victim, signal.SIGKILL)
    async with asyncio.timeout(20):
        while victim in program.children or len(program.children) < 2:
            await asyncio.sleep(0.02)
    for _ in range(4):
        assert (await ask(program.port, CHAT, PROMPT)).status == 200
