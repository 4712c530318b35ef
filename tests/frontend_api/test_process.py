"""The real program: its command line, its processes, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import redis

from controlplane.fleet import config
from controlplane.fleet.errors import InvalidInput
from controlplane.fleet.model import Role
from controlplane.fleet.wire import (
    LOADS_CHANNEL,
    REQUESTS_STREAM,
    SNAPSHOT_KEY,
    Affinity,
    Disaggregate,
    FleetSnapshot,
    OnPrefillFailure,
    RouterLoads,
    RoutingMode,
    RoutingPolicy,
    SnapshotDeployment,
    SnapshotEngine,
    SnapshotKey,
    decode,
    encode,
)
from frontend_api import standalone
from frontend_api.command import bind, options, parser
from frontend_api.http import vanished
from tests.conftest import RedisServer, free_port
from tests.frontend_api.client import PROMPT, Client, ask
from tests.frontend_api.conftest import KEYS, until
from tests.frontend_api.scripted import (
    DONE,
    LAST,
    ROLE,
    STREAM_HEAD,
    Answer,
    Heard,
    ScriptedEngine,
    after,
    answer_well,
    chunk,
    framed,
)

CHAT = "/v1/chat/completions"


class Program:
    """One `python -m frontend_api`."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self.port = free_port()
        self.folder = folder
        self.log = folder / f"log-{self.port}"
        given = {"TANDEM_HOME": str(folder), **environment}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "frontend_api", "--port", str(self.port), *arguments],
                env={**os.environ, **given},
                stdout=log,
                stderr=log,
            )

    async def up(self) -> Program:
        async with asyncio.timeout(20):
            while True:
                assert self.process.poll() is None, self.log.read_text()
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    if (await ask(self.port, "/ready")).status == 200:
                        return self
                await asyncio.sleep(0.02)

    @property
    def children(self) -> set[int]:
        return {child.pid for child in psutil.Process(self.process.pid).children()}

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, 20)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


Run = Callable[..., Awaitable[Program]]


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    programs: list[Program] = []

    async def start(*arguments: str, **environment: str) -> Program:
        programs.append(Program(tmp_path, *arguments, **environment))
        return await programs[-1].up()

    yield start
    for program in programs:
        program.kill()


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    found = await ScriptedEngine().start()
    yield found
    await found.stop()


def fleet(url: str, keys: tuple[SnapshotKey, ...] = KEYS) -> bytes:
    engines = (SnapshotEngine(id="a", name="a", attempt=1, role=Role.AGGREGATED, url=url),)
    deployment = SnapshotDeployment(name="d", served_name="m", routing=RoutingPolicy(), engines=engines)
    return encode(FleetSnapshot(version=1, deployments=(deployment,), keys=keys))


async def test_processes_share_one_port_and_are_replaced(run: Run, engine: ScriptedEngine) -> None:
    program = await run("--no-auth", "--model", "m", "--aggregated", engine.url, "--processes", "2")
    await until(lambda: len(program.children) == 2)
    before = program.children
    victim = min(before)
    os.kill(victim, signal.SIGKILL)
    await until(lambda: len(program.children) == 2 and victim not in program.children)
    for _ in range(8):
        assert (await ask(program.port, CHAT, PROMPT)).status == 200

    async def counted() -> str:
        return (await ask(program.port, "/metrics")).body.decode()

    async with asyncio.timeout(10):  # whichever process answers tells of all, also of what the dead one had counted
        while 'result="ok"} 8\n' not in await counted():
            await asyncio.sleep(0.1)
    second = min(program.children)
    os.kill(second, signal.SIGKILL)
    await until(lambda: len(program.children) == 2 and second not in program.children)
    async with asyncio.timeout(10):
        while 'result="ok"} 8\n' not in (text := await counted()) or 'snapshot_version{process="1"}' not in text:
            await asyncio.sleep(0.1)
    program.process.terminate()
    assert await program.ended() == 0
    assert not any(psutil.pid_exists(pid) for pid in before)


def of_each(program: Program) -> list[int]:
    """Client connections of each process."""
    return [
        sum(
            1
            for c in psutil.Process(pid).net_connections("tcp")
            if c.status == "ESTABLISHED" and c.laddr.port == program.port
        )
        for pid in sorted(program.children)
    ]


async def test_connections_spread_evenly(run: Run, engine: ScriptedEngine) -> None:
    """A burst of connections that stay; then some of one process end, and newcomers fill up what is missing."""
    program = await run("--no-auth", "--model", "m", "--aggregated", engine.url, "--processes", "4")
    async with AsyncExitStack() as stack:
        clients = [Client(program.port) for _ in range(400)]
        await asyncio.gather(*(stack.enter_async_context(client) for client in clients))
        for client in clients:
            client.post("/health")
        await asyncio.gather(*(client.reply() for client in clients))
        assert of_each(program) == [100] * 4
        first = psutil.Process(min(program.children))
        ports = {c.raddr.port for c in first.net_connections("tcp") if c.raddr}
        mine = [c for c in clients if c.writer.get_extra_info("sockname")[1] in ports]
        assert len(mine) == 100
        for client in mine[:40]:
            client.writer.transport.abort()
        await until(lambda: sum(of_each(program)) == 360)
        for _ in range(40):
            client = await stack.enter_async_context(Client(program.port))
            client.post("/health")
            await client.reply()
        assert of_each(program) == [100] * 4


async def test_the_death_of_one_process_breaks_its_own_streams_only(run: Run, engine: ScriptedEngine) -> None:
    go_on = asyncio.Event()

    async def slowly(heard: Heard, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + framed(ROLE + chunk("a")))
        await go_on.wait()
        writer.write(framed(chunk("b")) + framed(DONE) + LAST)

    engine.answer = slowly
    program = await run("--no-auth", "--model", "m", "--aggregated", engine.url, "--processes", "4")
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(program.port)) for _ in range(16)]
        for client in clients:
            client.post(CHAT, {**PROMPT, "stream": True})
        for client in clients:
            await client.head()
        assert of_each(program) == [4] * 4
        victim = min(program.children)
        os.kill(victim, signal.SIGKILL)
        await until(lambda: victim not in program.children and len(program.children) == 4)
        go_on.set()
        whole = [b"data: [DONE]" in await client.closed_or_done() for client in clients]
        assert sum(whole) == 12
        more = [await stack.enter_async_context(Client(program.port)) for _ in range(8)]
        for client in more:
            client.post("/ready")
            assert (await client.reply()).status == 200


async def test_sigterm_lets_the_streams_of_all_processes_finish(run: Run, engine: ScriptedEngine) -> None:
    go_on = asyncio.Event()
    engine.answer = after(go_on)
    program = await run("--no-auth", "--model", "m", "--aggregated", engine.url, "--processes", "4")
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(program.port)) for _ in range(12)]
        idle = await stack.enter_async_context(Client(program.port))
        idle.post("/health")
        await idle.reply()
        for client in clients:
            client.post(CHAT, {**PROMPT, "stream": True})
        await until(lambda: len(engine.heard) == 12)
        program.process.terminate()
        await until(lambda: program.log.read_text().count("Draining") == 4)
        assert await idle.closed() == b""
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", program.port)
        go_on.set()
        for client in clients:
            assert (await client.reply()).body.endswith(b"data: [DONE]\n\n")
    assert await program.ended() == 0


async def test_a_process_that_drains_alone_gets_no_more(run: Run, engine: ScriptedEngine) -> None:
    go_on = asyncio.Event()
    engine.answer = after(go_on)
    program = await run("--no-auth", "--model", "m", "--aggregated", engine.url, "--processes", "2")
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(program.port)) for _ in range(2)]
        for client in clients:
            client.post(CHAT, PROMPT)
        await until(lambda: len(engine.heard) == 2)
        victim = min(program.children)
        os.kill(victim, signal.SIGTERM)
        await until(lambda: "Draining 1" in program.log.read_text())
        for _ in range(8):
            assert (await ask(program.port, "/ready")).status == 200
        assert victim in program.children
        go_on.set()
        assert [(await client.reply()).status for client in clients] == [200, 200]
        await until(lambda: victim not in program.children and len(program.children) == 2)
        async with asyncio.timeout(10):  # its successor carries on what it had counted to the very end
            while 'result="ok"} 2\n' not in (await ask(program.port, "/metrics")).body.decode():
                await asyncio.sleep(0.1)


async def test_redis_goes_while_requests_run_and_comes_back(run: Run, engine: ScriptedEngine, tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    try:
        control = redis.Redis.from_url(server.url)
        control.set(SNAPSHOT_KEY, fleet(engine.url))
        program = await run("--processes", "2", REDIS_URL=server.url)
        good = {"Authorization": "Bearer tdm-inference"}
        assert (await ask(program.port, CHAT, PROMPT, **good)).status == 200
        await asyncio.to_thread(server.stop)
        for _ in range(6):
            assert (await ask(program.port, CHAT, PROMPT, **good)).status == 200
            assert (await ask(program.port, CHAT, PROMPT)).status == 401
        await asyncio.to_thread(server.start)
        written = control.xlen(REQUESTS_STREAM)
        async with asyncio.timeout(15):
            while control.xlen(REQUESTS_STREAM) == written:
                assert (await ask(program.port, CHAT, PROMPT, **good)).status == 200
                await asyncio.sleep(0.05)
    finally:
        await asyncio.to_thread(server.stop)


@pytest.mark.parametrize("processes", [2, 4])
async def test_real_routers_do_not_herd(run: Run, tmp_path: Path, processes: int) -> None:
    """Case dyn-A22. Alone, each process would begin with the same engine: one request after the other, and a burst."""
    go_on = asyncio.Event()
    engines = [await ScriptedEngine(after(go_on)).start() for _ in range(4)]
    urls = [engine.url for engine in engines]
    program = await run("--no-auth", "--model", "m", "--aggregated", *urls, "--processes", str(processes))
    counts = lambda: [len(engine.heard) for engine in engines]  # noqa: E731
    async with AsyncExitStack() as stack:
        for number in range(8):
            client = await stack.enter_async_context(Client(program.port))
            client.post(CHAT, PROMPT)
            await until(lambda: sum(counts()) == number + 1)  # noqa: B023 - awaited here
            if number == 3:
                assert counts() == [1] * 4
        assert counts() == [2] * 4
        burst = [await stack.enter_async_context(Client(program.port)) for _ in range(440)]
        for client in burst:
            client.post(CHAT, PROMPT)
        await until(lambda: sum(counts()) == 448)
        assert max(counts()) - min(counts()) <= 32
        go_on.set()
        for client in burst:
            assert (await client.reply()).status == 200
    for engine in engines:
        await engine.stop()


async def test_routers_of_two_hosts_see_each_others_loads(run: Run, engine: ScriptedEngine, redis_url: str) -> None:
    """One engine that may have one request: the second host's waits until the first host's is over."""
    free = asyncio.Event()

    async def later(heard: Heard, writer: asyncio.StreamWriter) -> None:
        await free.wait()
        await answer_well(heard, writer)

    engine.answer = later
    control = redis.Redis.from_url(redis_url)
    engines = (SnapshotEngine(id="a", name="a", attempt=1, role=Role.AGGREGATED, url=engine.url),)
    deployment = SnapshotDeployment("d", "m", RoutingPolicy(max_in_flight=1), engines)
    control.set(SNAPSHOT_KEY, encode(FleetSnapshot(1, deployments=(deployment,))))
    one = await run("--no-auth", REDIS_URL=redis_url)
    two = await run("--no-auth", "--processes", "2", REDIS_URL=redis_url)
    await until(lambda: cast(list[tuple[bytes, int]], control.pubsub_numsub(LOADS_CHANNEL))[0][1] == 3)
    ear = control.pubsub(ignore_subscribe_messages=True)
    ear.subscribe(LOADS_CHANNEL)
    first = asyncio.create_task(ask(one.port, CHAT, PROMPT))
    told = 0
    async with asyncio.timeout(10):
        while told < 2:  # what is told again was heard before
            message = await asyncio.to_thread(ear.get_message, timeout=1.0)
            told += message is not None and decode(message["data"], RouterLoads).loads == {"a:1": (1, 0)}
    second = asyncio.create_task(ask(two.port, CHAT, PROMPT))
    async with asyncio.timeout(10):
        while b'tandem_router_waiting{deployment="d"} 1' not in (await ask(two.port, "/metrics")).body:
            await asyncio.sleep(0.05)
    assert len(engine.heard) == 1
    free.set()
    assert [(await first).status, (await second).status] == [200, 200]
    ear.close()


async def test_loads_and_limits_are_one_for_all_processes(run: Run, engine: ScriptedEngine, tmp_path: Path) -> None:
    """Four processes, two engines: as many requests at each, never more than the limit, and after the burst none waits."""
    second = await ScriptedEngine().start()
    now: Counter[int] = Counter()
    most: Counter[int] = Counter()

    def counted(number: int) -> Answer:
        async def answer(heard: Heard, writer: asyncio.StreamWriter) -> None:
            now[number] += 1
            most[number] = max(most[number], now[number])
            await asyncio.sleep(0.002)
            now[number] -= 1
            await answer_well(heard, writer)

        return answer

    engine.answer, second.answer = counted(0), counted(1)
    file = tmp_path / "fleet.json"
    engines = tuple(
        SnapshotEngine(id=n, name=n, attempt=1, role=Role.AGGREGATED, url=e.url)
        for n, e in (("a", engine), ("b", second))
    )
    deployment = SnapshotDeployment("d", "m", RoutingPolicy(max_in_flight=6), engines)
    file.write_bytes(encode(FleetSnapshot(1, deployments=(deployment,))))
    program = await run("--fleet", str(file), "--no-auth", "--processes", "4")
    try:
        replies = await asyncio.gather(*(ask(program.port, CHAT, PROMPT) for _ in range(400)))
        assert {reply.status for reply in replies} == {200}
        assert max(most.values()) <= 6
        assert min(len(engine.heard), len(second.heard)) >= 160  # by time each takes as many
    finally:
        await second.stop()


async def test_children_end_when_their_parent_is_killed(run: Run, engine: ScriptedEngine) -> None:
    program = await run("--no-auth", "--model", "m", "--aggregated", engine.url)
    (child,) = program.children
    program.kill()
    await until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", program.port)


async def test_sigterm_lets_a_stream_finish(run: Run, engine: ScriptedEngine) -> None:
    go_on = asyncio.Event()
    engine.answer = after(go_on)
    program = await run("--no-auth", "--model", "m", "--aggregated", engine.url)
    async with Client(program.port) as client:
        client.post(CHAT, {**PROMPT, "stream": True})
        await until(lambda: bool(engine.heard))
        program.process.terminate()
        await until(lambda: "Draining" in program.log.read_text())
        go_on.set()
        assert (await client.reply()).body.endswith(b"data: [DONE]\n\n")
    assert await program.ended() == 0


async def test_the_drain_has_a_limit(run: Run, engine: ScriptedEngine) -> None:
    async def never(heard: Heard, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    engine.answer = never
    program = await run("--no-auth", "--model", "m", "--aggregated", engine.url, "--drain-seconds", "0.2")
    async with Client(program.port) as client:
        client.post(CHAT, PROMPT)
        await until(lambda: bool(engine.heard))
        program.process.send_signal(signal.SIGINT)
        assert await client.closed() == b""
    assert await program.ended() == 0


def established(pid: int) -> list[Any]:
    return [c for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED]


async def test_kv_that_a_client_left_behind_is_freed_before_it_ends(run: Run, engine: ScriptedEngine) -> None:
    go_on = asyncio.Event()
    engine.answer = after(go_on)
    decode = await ScriptedEngine().start()
    program = await run("--no-auth", "--model", "m", "--prefill", engine.url, "--decode", decode.url)
    async with Client(program.port) as client:
        client.post(CHAT, PROMPT)
        await until(lambda: bool(engine.heard))
    (child,) = program.children
    await until(lambda: not any(c.laddr.port == program.port for c in established(child)))
    program.process.terminate()
    go_on.set()
    assert await program.ended() == 0
    assert [heard.body["max_tokens"] for heard in decode.heard] == [0]
    await decode.stop()


async def test_it_follows_redis_and_starts_again_without_it(run: Run, engine: ScriptedEngine, redis_url: str) -> None:
    control = redis.Redis.from_url(redis_url)
    control.set(SNAPSHOT_KEY, fleet(engine.url))
    program = await run(REDIS_URL=redis_url)
    good = {"Authorization": "Bearer tdm-inference"}
    assert (await ask(program.port, CHAT, PROMPT, **good)).status == 200
    await until(lambda: control.xlen(REQUESTS_STREAM) == 1)
    await until(lambda: len(list(control.scan_iter("tandem:router:*"))) == 1)
    program.process.terminate()
    assert await program.ended() == 0
    again = await run(REDIS_URL="redis://127.0.0.1:1/0")  # from the copy on disk
    assert (await ask(again.port, CHAT, PROMPT, **good)).status == 200
    assert (await ask(again.port, CHAT, PROMPT)).status == 401
    assert "tdm-inference" not in again.log.read_text()


async def test_a_fleet_from_a_file(run: Run, engine: ScriptedEngine, tmp_path: Path) -> None:
    file = tmp_path / "fleet.json"
    file.write_bytes(fleet(engine.url))
    program = await run("--fleet", str(file))
    assert (await ask(program.port, CHAT, PROMPT, Authorization="Bearer tdm-inference")).status == 200
    assert (await ask(program.port, CHAT, PROMPT)).status == 401


def refused(tmp_path: Path, *arguments: str, port: int | None = None) -> str:
    """The one sentence of a start that is refused."""
    command = [sys.executable, "-m", "frontend_api", "--port", str(port or free_port()), *arguments]
    done = subprocess.run(
        command, env={**os.environ, "TANDEM_HOME": str(tmp_path)}, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    return line


async def test_another_tandem_on_the_port_is_an_error(run: Run, engine: ScriptedEngine, tmp_path: Path) -> None:
    for processes in ("1", "3"):
        arguments = ("--no-auth", "--model", "m", "--aggregated", engine.url, "--processes", processes)
        program = await run(*arguments)
        line = await asyncio.to_thread(refused, tmp_path, *arguments, port=program.port)
        assert f"Port {program.port}" in line
        assert (await ask(program.port, "/ready")).status == 200
        with socket.socket() as shares:  # not even one that would share it
            shares.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            with pytest.raises(OSError, match="in use"):
                shares.bind(("127.0.0.1", program.port))
    sock = bind("127.0.0.1", 0)
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT) == 0
    sock.close()


def test_the_kernel_looks_after_clients_that_vanish() -> None:
    """What an accepted connection has of the listening socket, on this kernel."""
    with bind("127.0.0.1", 0) as door, socket.create_connection(door.getsockname()[:2]):
        door.setblocking(True)
        accepted, _ = door.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == vanished.CLIENT_SECONDS // 2
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == vanished.CLIENT_SECONDS * 1_000


def test_an_occupied_port_is_one_clear_sentence(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        line = refused(tmp_path, "--no-auth", "--model", "m", "--aggregated", "http://x:1", port=port)
    assert f"Port {port}" in line
    assert "--port" in line


@pytest.mark.parametrize(
    ("host", "port", "says"),
    [
        ("127.0.0.1", 99_999, "--port: choose 1 to 65535"),
        ("127.0.0.1", -1, "--port: choose 1 to 65535"),
        ("192.0.2.7", 0, "192.0.2.7 is not an address of this machine: choose another with --host or TANDEM_BIND"),
    ],
)
def test_an_address_that_cannot_be_listened_on_is_named(host: str, port: int, says: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(says)):
        bind(host, port)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "REDIS_URL"),
        (["--fleet", "/nowhere"], "--fleet /nowhere"),
        (["--fleet", "/dev/null"], "--fleet /dev/null"),
        (["--model", "m", "--aggregated", "http://x:1"], "--no-auth"),
        (["--aggregated", "http://x:1"], "--model"),
        (["--fleet", "/nowhere", "--mode", "kv"], "--model"),
        (["--fleet", "/nowhere", "--tokenizer", "/model"], "--model"),
        (["--fleet", "/nowhere", "--aggregated", "http://x:1"], "--model"),
        (["--no-auth", "--model", "m", "--aggregated", "http://x:1", "http://x:1/"], "http://x:1 is given twice"),
        (["--no-auth", "--model", "m", "--aggregated", "http://x:1/v1"], "http://HOST:PORT"),
        (["--no-auth", "--model", "m"], "--aggregated"),
        (["--no-auth", "--model", "m", "--prefill", "http://x:1"], "--decode"),
        (["--no-auth", "--model", "m", "--aggregated", "x:1"], "http://HOST:PORT"),
        (["--no-auth", "--model", "m", "--aggregated", "http://x:1", "--processes", "99"], "--processes"),
        (["--no-auth", "--model", "m", "--aggregated", "http://x:1", "--max-in-flight", "0"], "--max-in-flight"),
        (["--no-auth", "--model", "m", "--aggregated", "http://x:1", "--temperature", "-1"], "--temperature"),
    ],
)
def test_arguments_that_do_not_fit(tmp_path: Path, arguments: list[str], says: str) -> None:
    assert says in refused(tmp_path, *arguments)


@pytest.mark.parametrize(
    "url", ["", "x", "https://x:1", "http://", "http://x:0", "http://x:99999", "http://x y:1", "http://x:1\r\nA: b",
            "http://x:1/v1", "http://x:1?a=b", "http://u:p@x:1", "http://u@x:1"],
)  # fmt: skip
def test_engine_urls_are_checked(url: str) -> None:
    with pytest.raises(InvalidInput):
        standalone.from_urls("m", aggregated=[url])


def test_a_fleet_file_without_keys_needs_no_auth(tmp_path: Path) -> None:
    file = tmp_path / "fleet.json"
    file.write_bytes(fleet("http://127.0.0.1:1", ()))
    assert "--no-auth" in refused(tmp_path, "--fleet", str(file))


def test_every_field_of_the_policy_is_an_option(tmp_path: Path) -> None:
    engines = ["--no-auth", "--model", "m", "--prefill", "http://a:1", "--decode", "http://b:1"]
    given = ["--mode", "random", "--on-prefill-failure", "fail", "--disaggregate", "always", "--affinity", "user",
             "--local-below-tokens", "64", "--temperature", "0.5", "--max-in-flight", "8", "--queue-limit", "9",
             "--queue-seconds", "1.5"]  # fmt: skip

    def policy(*arguments: str) -> RoutingPolicy:
        fleet = options(parser().parse_args([*engines, *arguments]), config.load({"TANDEM_HOME": str(tmp_path)})).fleet
        assert fleet is not None
        return fleet.deployments[0].routing

    assert policy() == RoutingPolicy()
    assert policy(*given) == RoutingPolicy(
        RoutingMode.RANDOM, OnPrefillFailure.FAIL, Disaggregate.ALWAYS, 64, Affinity.USER, 0.5, 8, 9, 1.5
    )


def test_engines_may_be_given_one_by_one(tmp_path: Path) -> None:
    engines = ["--prefill", "http://a:1", "--decode", "http://b:1", "http://b:2", "--prefill", "http://a:2"]
    arguments = parser().parse_args(["--no-auth", "--model", "m", *engines])
    fleet = options(arguments, config.load({"TANDEM_HOME": str(tmp_path)})).fleet
    assert fleet is not None
    assert sorted(e.url for e in fleet.deployments[0].engines) == [
        "http://a:1",
        "http://a:2",
        "http://b:1",
        "http://b:2",
    ]
    assert parser().parse_args([]).prefill == []


def test_a_tokenizer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    engines = ["--no-auth", "--model", "m", "--aggregated", "http://a:1", "--tokenizer", str(tmp_path / "model")]
    settings = config.load({"TANDEM_HOME": str(tmp_path)})
    with pytest.raises(InvalidInput, match="model: there is no such folder"):
        options(parser().parse_args(engines), settings)
    (tmp_path / "model").mkdir()
    options(parser().parse_args(engines), settings)


def test_a_policy_in_a_fleet_file_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "fleet.json"
    file.write_bytes(fleet("http://127.0.0.1:1").replace(b'"routing":{}', b'"routing":{"queue_seconds":-1}'))
    with pytest.raises(InvalidInput, match=r"deployment d: routing\.queue_seconds: -1"):
        standalone.from_file(file)


def test_two_deployments_of_a_fleet_file_may_not_serve_one_name(tmp_path: Path) -> None:
    one, two = (SnapshotDeployment(name=name, served_name="m", routing=RoutingPolicy(), engines=()) for name in "ab")
    file = tmp_path / "fleet.json"
    file.write_bytes(encode(FleetSnapshot(version=1, deployments=(one, two))))
    with pytest.raises(InvalidInput, match="two deployments serve m"):
        standalone.from_file(file)


EVENTS = "http://a:1=tcp://a:2,replay=tcp://a:3"


def test_a_fleet_from_the_command_line_knows_its_publishers() -> None:
    policy = RoutingPolicy(mode=RoutingMode.KV)
    snapshot = standalone.from_urls(
        "m",
        prefill=["http://a:1/"],
        decode=["http://b:1", "http://c:1"],
        routing=policy,
        tokenizer="/model",
        kv_events=[EVENTS, "http://c:1=tcp://[::1]:2,ranks=4"],
    )
    (deployment,) = snapshot.deployments
    assert (deployment.routing, deployment.tokenizer) == (policy, "/model")
    assert [(e.name, e.events, e.replay, e.ranks) for e in deployment.engines] == [
        ("prefill-0", "tcp://a:2", "tcp://a:3", 1),
        ("decode-0", "", "", 1),
        ("decode-1", "tcp://[::1]:2", "", 4),
    ]


@pytest.mark.parametrize(
    ("mode", "more", "field"),
    [
        ("kv", {"kv_events": [EVENTS]}, "tokenizer"),
        ("kv-approximate", {}, "tokenizer"),
        ("kv", {"tokenizer": "/model"}, "kv_events"),
        ("kv", {"tokenizer": "/model", "kv_events": ["http://b:1=tcp://a:2"]}, "kv_events"),
        ("kv", {"tokenizer": "/model", "kv_events": [EVENTS, "http://a:1/=tcp://a:4"]}, "kv_events"),
        ("least-load", {"tokenizer": "/model", "kv_events": [EVENTS]}, "kv_events"),
        ("kv-approximate", {"tokenizer": "/model", "kv_events": [EVENTS]}, "kv_events"),
        *(
            ("kv", {"tokenizer": "/model", "kv_events": [f"http://a:1{rest}"]}, "kv_events")
            for rest in (
                "",
                "=",
                "=a:2",
                "=http://a:2",
                "=tcp://a",
                "=tcp://*:2",
                "=tcp://a:2,replay=",
                "=tcp://a:x",
                "=tcp://a:2,ranks=0",
                "=tcp://a:2,ranks=-1",
                "=tcp://a:2,ranks",
                "=tcp://a:2,tcp://a:3",
            )
        ),
    ],
)
def test_what_kv_routing_lacks_is_named(mode: str, more: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as error:
        standalone.from_urls("m", aggregated=["http://a:1"], routing=RoutingPolicy(mode=RoutingMode(mode)), **more)
    assert error.value.field == field
