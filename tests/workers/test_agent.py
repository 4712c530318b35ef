"""The agent with real stand-in engines: a plan becomes processes, processes become a report."""

from __future__ import annotations

import os
import signal
import stat

import httpx
import msgspec
import psutil
import pytest

from controlplane.fleet.model import EngineAssignment, Observation, Peer, Phase, Role
from controlplane.fleet.wire import NodePlan
from tests.workers.conftest import Node, assignment, until
from workers import answering, pairs, probe
from workers.ports import numbers

P, D, A = Role.PREFILL, Role.DECODE, Role.AGGREGATED


def up(node: Node, *engines: EngineAssignment) -> list[Observation]:
    node.want(*engines)
    return [node.until_phase(one.engine, Phase.WARMING) for one in engines]


def with_peer(decode: EngineAssignment, prefill: EngineAssignment, seen: Observation) -> EngineAssignment:
    assert seen.ports
    peer = Peer(prefill.engine, prefill.attempt, f"http://{seen.address}:{seen.ports.http}", prefill.secret)
    return msgspec.structs.replace(decode, peers=(peer,))


def set_faults(engine: EngineAssignment, seen: Observation, *faults: str) -> None:
    assert seen.ports
    url = f"http://{seen.address}:{seen.ports.http}/sim/faults"
    httpx.post(
        url, json={"faults": list(faults)}, headers={"Authorization": f"Bearer {engine.secret}"}
    ).raise_for_status()


def running(pid: int | None) -> bool:
    return pid is not None and psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_plan_becomes_engines_that_really_answer(node: Node) -> None:
    prefill, decode = assignment("p", P), assignment("d", D)
    seen = up(node, prefill, decode)
    for one, engine in zip(seen, (prefill, decode), strict=True):
        assert (one.engine, one.attempt) == (engine.engine, 1)
        assert one.version == "0.32.0"
        assert one.max_model_len
        assert one.block_size == 16
        assert one.kv_events is True
        assert one.load is not None
        assert one.load.generated_tokens > 0, "a real completion came first"
        assert engine.secret not in " ".join(one.command)
        assert "workers.sim" in one.command
    report = node.mailbox.reports[-1]
    assert report.plan_generation == 1
    assert report.facts.address == "127.0.0.1"
    assert report.sequence == len(node.mailbox.reports)


def test_engines_listen_on_the_nodes_address_alone(node: Node) -> None:
    seen = up(node, assignment("p", P), assignment("d", D), assignment("a", A))
    taken: list[int] = []
    for one in seen:
        process = psutil.Process(one.pid)
        sockets = [
            c.laddr
            for member in (process, *process.children(recursive=True))
            for c in member.net_connections(kind="inet")
            if c.status == psutil.CONN_LISTEN
        ]
        assert {_plain(socket.ip) for socket in sockets} == {"127.0.0.1"}
        assert {socket.port for socket in sockets} == set(numbers(one.ports))
        taken += [socket.port for socket in sockets]
    assert len(set(taken)) == 4 + 4 + 3


def _plain(ip: str) -> str:
    return ip.removeprefix("::ffff:")


def test_files_with_secrets_are_the_owners_alone(node: Node) -> None:
    up(node, assignment("d", D))
    files = [path for path in node.folder.rglob("*") if path.is_file()]
    assert {"engine.json", "engine.log", "applied.json"} <= {path.name for path in files}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE((node.folder / "engines").stat().st_mode) == 0o700


def test_an_engine_inherits_none_of_the_agents_secrets(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REDIS_URL", "HF_TOKEN", "TANDEM_SECRET_KEY", "DATABASE_URL_FILE"):
        monkeypatch.setenv(name, "hidden")
    monkeypatch.setenv("LANG", "C.UTF-8")
    (seen,) = up(node, assignment("d", D))
    environment = psutil.Process(seen.pid).environ()
    assert "hidden" not in environment.values()
    assert environment["LANG"] == "C.UTF-8"


def test_each_pair_is_proved_by_bytes_that_moved(node: Node) -> None:
    prefill, decode = assignment("p", P), assignment("d", D)
    seen_p, _ = up(node, prefill, decode)
    node.want(prefill, with_peer(decode, prefill, seen_p))
    until(lambda: (seen := node.seen("d")) and seen.pairs)
    (proof,) = node.seen("d").pairs  # type: ignore[union-attr]
    assert (proof.prefill, proof.prefill_attempt, proof.ok) == ("p", 1, True)
    assert proof.bytes_moved > 0
    assert node.seen("p").pairs == ()  # type: ignore[union-attr]


def test_a_pair_that_fails_is_named_and_tried_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "FIRST_RETRY_SECONDS", 0.1)
    prefill, decode = assignment("p", P), assignment("d", D)
    seen_p, _ = up(node, prefill, decode)
    set_faults(prefill, seen_p, "missing-params")
    node.want(prefill, with_peer(decode, prefill, seen_p))
    until(lambda: (seen := node.seen("d")) and seen.pairs)
    (proof,) = node.seen("d").pairs  # type: ignore[union-attr]
    assert not proof.ok
    assert "without KV transfer parameters" in proof.detail
    set_faults(prefill, seen_p)
    until(lambda: (seen := node.seen("d")) and seen.pairs and seen.pairs[0].ok)


def test_a_partner_that_is_not_up_is_no_failed_pair(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    health = probe.EngineClient.health

    def counted(client: probe.EngineClient) -> None:
        tried.append(client.url)
        health(client)

    monkeypatch.setattr(probe.EngineClient, "health", counted)
    decode = msgspec.structs.replace(assignment("d", D), peers=(Peer("p", 1, "http://127.0.0.1:9", "s"),))
    up(node, decode)
    until(lambda: "http://127.0.0.1:9" in tried)
    until(lambda: node.seen("d") and len(tried) > 5)
    assert node.seen("d").pairs == ()  # type: ignore[union-attr]


def test_a_partner_that_stays_out_of_reach_is_a_failed_pair(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "FIRST_RETRY_SECONDS", 0.05)
    up(node, msgspec.structs.replace(assignment("d", D), peers=(Peer("p", 1, "http://127.0.0.1:9", "s"),)))
    until(lambda: (seen := node.seen("d")) and seen.pairs)
    (proof,) = node.seen("d").pairs  # type: ignore[union-attr]
    assert (proof.ok, proof.fault) == (False, None)
    assert proof.detail.startswith("p cannot be reached at http://127.0.0.1:9 from this node")


def test_a_pair_over_which_requests_fail_is_proved_anew(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "FIRST_RETRY_SECONDS", 0.1)
    monkeypatch.setattr(pairs, "PROVE_ANEW_SECONDS", 0.1)
    prefill, decode = assignment("p", P), assignment("d", D)
    seen_p, seen_d = up(node, prefill, decode)
    paired = with_peer(decode, prefill, seen_p)
    node.want(prefill, paired)
    until(lambda: (seen := node.seen("d")) and seen.pairs)
    set_faults(decode, seen_d, "transfer-fails")
    doubted = msgspec.structs.replace(paired.peers[0], doubted=True)
    node.want(prefill, msgspec.structs.replace(paired, peers=(doubted,)))
    until(lambda: (seen := node.seen("d")) and not seen.pairs[0].ok)
    proof = node.seen("d").pairs[0]  # type: ignore[union-attr]
    assert proof.detail.startswith("Decode with KV from p failed: /v1/completions answered 500")
    assert proof.fault is None, "each answers alone"
    set_faults(decode, seen_d)
    until(lambda: (seen := node.seen("d")) and seen.pairs[0].ok)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("http-500", "/v1/completions answered 500"),
        ("hang", "/v1/completions gave no answer in time"),
    ],
)
def test_an_engine_that_calls_itself_healthy_and_answers_nothing_is_unhealthy_and_recovers(
    node: Node, monkeypatch: pytest.MonkeyPatch, fault: str, says: str
) -> None:
    monkeypatch.setattr(answering, "LONGEST_SECONDS", 0.4)
    node.pace = msgspec.structs.replace(node.pace, completion=0.3)
    node.new_agent()
    engine = assignment("d", D)
    (seen,) = up(node, engine)
    set_faults(engine, seen, fault)
    sick = node.until_phase("d", Phase.UNHEALTHY)
    assert sick.detail.startswith("It says that it is healthy, but a test completion failed: ")
    assert says in sick.detail
    set_faults(engine, seen)
    assert node.until_phase("d", Phase.WARMING).pid == seen.pid


def test_proofs_of_a_partner_that_went_are_dropped(node: Node) -> None:
    prefill, decode = assignment("p", P), assignment("d", D)
    seen_p, _ = up(node, prefill, decode)
    paired = with_peer(decode, prefill, seen_p)
    node.want(prefill, paired)
    until(lambda: (seen := node.seen("d")) and seen.pairs)
    node.want(decode)
    node.agent.one_step()
    assert node.seen("d").pairs == ()  # type: ignore[union-attr]


def test_what_is_not_wanted_ends_and_leaves_the_report(node: Node) -> None:
    first, second = up(node, assignment("d", D), assignment("a", A))
    keep = next(run.assignment for run in node.agent.runs() if run.assignment.engine == "a")
    node.want(keep)
    until(lambda: node.seen("d") is None)
    assert not running(first.pid)
    assert running(second.pid)


def test_an_agent_told_to_stop_says_that_its_node_takes_nothing_more(node: Node) -> None:
    up(node, assignment("d", D))
    assert not node.mailbox.reports[-1].leaving
    node.agent.stop_all()
    last = node.mailbox.reports[-1]
    assert last.leaving
    assert [(one.phase, one.stopped, one.detail) for one in last.engines] == [
        (Phase.EXITED, True, "Stopped: its agent stops.")
    ]


def test_a_newer_attempt_takes_the_older_ones_place(node: Node) -> None:
    (old,) = up(node, assignment("d", D))
    node.want(assignment("d", D, attempt=2))
    until(lambda: (seen := node.seen("d")) and seen.attempt == 2 and seen.phase is Phase.WARMING)
    new = node.seen("d")
    assert new is not None
    assert new.pid != old.pid
    assert not running(old.pid)
    assert [one.attempt for one in node.mailbox.reports[-1].engines] == [2]


def test_a_killed_engine_is_told_with_its_signal_and_not_started_again(node: Node) -> None:
    engine = assignment("d", D)
    (seen,) = up(node, engine)
    assert seen.pid
    os.kill(seen.pid, signal.SIGKILL)
    dead = node.until_phase("d", Phase.EXITED)
    assert dead.exit_code == -signal.SIGKILL
    assert "SIGKILL" in dead.detail
    for _ in range(3):
        node.want(engine)
        assert node.seen("d") == dead
    node.want()
    assert node.seen("d") is None


def test_an_engine_that_cannot_start_says_why(node: Node) -> None:
    engine = assignment("d", D, extra_args=("--fault", "no-such-fault"))
    node.want(engine)
    dead = node.until_phase("d", Phase.EXITED)
    assert dead.exit_code == 2
    assert "unknown fault 'no-such-fault'" in dead.detail
    assert engine.secret not in dead.detail


def test_messages_may_be_late_repeated_or_for_another_node(node: Node) -> None:
    (seen,) = up(node, assignment("d", D))
    (wanted,) = node.mailbox.plan.engines  # type: ignore[union-attr]
    node.want(wanted)
    node.agent.one_step()
    for late in (
        NodePlan(node.name, 1),
        NodePlan(node.name, 1, (assignment("other", D),)),
        NodePlan("another-node", 99),
        node.mailbox.plan,
        node.mailbox.plan,
        None,
    ):
        node.mailbox.plan = late
        node.agent.wake()
        node.agent.one_step()
        now = node.seen("d")
        assert now is not None
        assert (now.pid, now.phase) == (seen.pid, Phase.WARMING)
        assert node.seen("other") is None
        assert node.mailbox.reports[-1].plan_generation == 2


def test_silence_of_redis_stops_nothing(node: Node) -> None:
    (seen,) = up(node, assignment("d", D))
    count = len(node.mailbox.reports)
    node.mailbox.away = True
    for _ in range(5):
        node.agent.report_now()
        node.agent.one_step()
    assert running(seen.pid)
    assert len(node.mailbox.reports) == count
    node.mailbox.away = False
    node.agent.one_step()
    assert len(node.mailbox.reports) == count + 1


def test_a_hung_engine_is_unhealthy_alone_and_recovers(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "QUICK_SECONDS", 0.2)
    hung, fine = up(node, assignment("d", D), assignment("a", A))
    assert hung.pid
    os.kill(hung.pid, signal.SIGSTOP)
    try:
        sick = node.until_phase("d", Phase.UNHEALTHY)
        assert "/health" in sick.detail
        other = node.seen("a")
        assert other is not None
        assert (other.pid, other.phase) == (fine.pid, Phase.WARMING)
    finally:
        os.kill(hung.pid, signal.SIGCONT)
    well = node.until_phase("d", Phase.WARMING)
    assert well.pid == hung.pid
    assert well.detail == "Answers completions."


def test_health_alone_is_not_ready(node: Node) -> None:
    engine = assignment("d", D, extra_args=("--fault", "http-500"))
    node.want(engine)
    until(lambda: (seen := node.seen("d")) and "cannot serve yet" in seen.detail)
    seen = node.seen("d")
    assert seen is not None
    assert seen.phase is Phase.STARTING
    set_faults(engine, seen)
    node.until_phase("d", Phase.WARMING)


def test_reports_come_on_change_and_on_the_beat_only(node: Node) -> None:
    up(node, assignment("d", D))
    node.agent.one_step()
    count = len(node.mailbox.reports)
    node.agent.one_step()
    node.agent.one_step()
    assert len(node.mailbox.reports) == count
    node.agent._reported_at -= 60
    node.agent.one_step()
    assert len(node.mailbox.reports) == count + 1
