"""Which node a machine is after its host, its name or its folder changed, and that no engine is left behind."""

from __future__ import annotations

import fcntl
import logging
from pathlib import Path

import msgspec
import pytest

from controlplane.fleet.errors import Conflict, InvalidInput
from controlplane.fleet.model import Phase, Role
from controlplane.fleet.this_node import NODE_FILE
from tests.workers.conftest import Node, assignment, until
from tests.workers.test_agent import running, up
from workers.record import Records
from workers.which_node import choose_name, refuse_forsaken_engines


def remember(home: Path, *names: str) -> None:
    """Nodes that this state folder has been."""
    (home / "agents").mkdir()
    for name in names:
        (home / "agents" / name).mkdir()
        (home / "agents" / name / NODE_FILE).touch()


@pytest.mark.parametrize(
    ("configured", "hostname", "stored", "name"),
    [
        ("", "gpu-1", [], "gpu-1"),
        ("", "gpu-1", ["gpu-1"], "gpu-1"),
        ("", "gpu-1", ["gpu-0", "gpu-1"], "gpu-1"),
        ("", "gpu-1", ["gpu-0"], "gpu-0"),
        ("", "???", ["gpu-0"], "gpu-0"),
        ("gpu-9", "gpu-1", ["gpu-0"], "gpu-9"),
        ("gpu-9", "gpu-1", ["gpu-0", "gpu-1"], "gpu-9"),
    ],
)
def test_the_name_is_the_one_set_else_the_stored_one_else_the_hosts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, configured: str, hostname: str, stored: list[str], name: str
) -> None:
    remember(tmp_path, *stored)
    (tmp_path / "agents" / "never-joined").mkdir()
    with caplog.at_level(logging.WARNING):
        assert choose_name(configured, tmp_path, hostname=hostname) == name
    renamed = not configured and stored == ["gpu-0"]
    assert ("goes on as node gpu-0, as its state folder says" in caplog.text) is renamed


def test_several_identities_and_another_host_are_a_question(tmp_path: Path) -> None:
    remember(tmp_path, "gpu-0", "gpu-1")
    with pytest.raises(
        InvalidInput, match="the identities of gpu-0, gpu-1, and none of this host, gpu-2: set the name"
    ):
        choose_name("", tmp_path, hostname="gpu-2")
    with pytest.raises(InvalidInput, match="TANDEM_NODE_NAME: use 1 to 63 lower-case letters"):
        choose_name("Not This", tmp_path, hostname="gpu-2")


def test_engines_of_another_identity_are_named_and_left_alone(node: Node) -> None:
    """Node x ended with KEEP_ENGINES=1; this machine shall be node y now."""
    (seen,) = up(node, assignment("d", Role.DECODE))
    agents = node.folder.parent
    waits: list[float] = []
    with pytest.raises(
        Conflict, match=r"^Engines of node x still run here \(1\).*TANDEM_NODE_NAME=x, which adopts them"
    ):
        refuse_forsaken_engines(agents, "y", sleep=waits.append)
    assert sum(waits) >= 10, "its agent may be about to start"
    assert running(seen.pid)
    refuse_forsaken_engines(agents, "x", sleep=waits.append)
    with (node.folder / "agent.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refuse_forsaken_engines(agents, "y", sleep=lambda _: pytest.fail("an agent looks after them"))
    node.want()
    until(lambda: node.seen("d") is None)
    refuse_forsaken_engines(agents, "y", sleep=lambda _: pytest.fail("nothing runs any more"))


def test_a_moved_state_folder_keeps_its_engines(node: Node) -> None:
    (seen,) = up(node, assignment("d", Role.DECODE))
    node.folder = node.folder.parent.rename(node.folder.parent.with_name("moved")) / "x"
    node.new_agent()
    assert node.until_phase("d", Phase.WARMING).pid == seen.pid
    node.want()
    until(lambda: node.seen("d") is None)
    assert not running(seen.pid)


def test_an_engine_on_a_former_address_is_ended_and_that_is_no_failure_of_it(node: Node) -> None:
    (seen,) = up(node, assignment("d", Role.DECODE))
    records = Records(node.folder / "engines")
    record = records.load("d", 1)
    assert record is not None
    records.save(msgspec.structs.replace(record, address="127.0.0.9"))
    node.new_agent()
    ended = node.until_phase("d", Phase.EXITED)
    assert ended.stopped
    assert ended.detail == ("Stopped: this node's address is 127.0.0.1 now, and the engine listens on 127.0.0.9.")
    assert not running(seen.pid)


def test_pids_of_another_machine_are_nobody_here(node: Node) -> None:
    """A copied disk: the numbers in the records name other processes on this machine."""
    (seen,) = up(node, assignment("d", Role.DECODE))
    records = Records(node.folder / "engines")
    record = records.load("d", 1)
    assert record is not None
    copy = Node(node.folder.parent / "copy")
    Records(copy.folder / "engines").save(msgspec.structs.replace(record, boot="another-boot"))
    copy.mailbox = node.mailbox
    copy.new_agent()
    (told,) = [run.observation() for run in copy.agent.runs()]
    assert (told.phase, told.exit_code) == (Phase.EXITED, None)
    copy.agent.stop_all()
    assert running(seen.pid)
