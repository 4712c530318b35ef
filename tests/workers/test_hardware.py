"""What the agent says of its machine, and the one address it lets engines listen on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pynvml
import pytest

from controlplane.fleet.errors import InvalidInput
from controlplane.fleet.model import NodeFacts, Runtime
from tests.workers.conftest import facts, until
from workers import hardware


@pytest.mark.parametrize(
    ("configured", "control_plane", "address"),
    [
        ("", "http://127.0.0.1:8000", "127.0.0.1"),
        ("", "http://localhost:8000", "127.0.0.1"),
        ("", "http://[::1]:8000", "127.0.0.1"),
        ("", "", "127.0.0.1"),
        ("127.0.0.2", "http://example.org", "127.0.0.2"),
    ],
)
def test_address(configured: str, control_plane: str, address: str) -> None:
    assert hardware.choose_address(configured, control_plane) == address


def test_the_address_is_the_one_that_leads_to_the_control_plane() -> None:
    ours = [a.address for name in psutil.net_if_addrs().values() for a in name if a.family.name == "AF_INET"]
    ours.sort(key=lambda address: address.startswith("127."))  # a machine may have no other
    assert hardware.choose_address("", f"http://{ours[0]}:8000") == ours[0]


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "*", "224.0.0.1", "192.0.2.77", "gpu-box", "::1", "127.0.0.1:80"])
def test_an_address_that_would_not_do_is_refused_by_name(address: str) -> None:
    with pytest.raises(InvalidInput, match="TANDEM_NODE_ADDRESS"):
        hardware.choose_address(address, "http://127.0.0.1:8000")


def test_a_control_plane_whose_name_is_not_found_is_said() -> None:
    with pytest.raises(InvalidInput, match=r"host tandem\.invalid is not found .*correct its name"):
        hardware.choose_address("", "http://tandem.invalid:8000")


def test_facts_of_this_machine(tmp_path: Path) -> None:
    seen = hardware.read_facts(
        "127.0.0.1", disk=tmp_path / "not" / "yet", engine_pids=(), runtimes=lambda gpus: (Runtime.SIM,)
    )
    assert seen.cpus == len(os.sched_getaffinity(0))
    assert 0 < seen.memory_free_bytes <= seen.memory_bytes
    assert seen.shm_bytes > 0
    assert seen.disk_free_bytes > 0
    assert seen.agent_version
    assert seen.runtimes == (Runtime.SIM,)
    assert (seen.driver == "") == (seen.gpus == ())


@pytest.mark.parametrize(
    ("cpuinfo", "native"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f\n", False),
        ("flags\t\t: fpu avx512_bf16 sse\n", True),
        ("flags\t\t: amx_bf16\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("model name\t: bf16 in a name\nflags\t: avx2\n", False),
        ("", False),
    ],
)
def test_native_bf16(cpuinfo: str, native: bool) -> None:
    assert hardware.has_native_bf16(cpuinfo) is native


@pytest.mark.parametrize(("text", "limit"), [("1073741824\n", 1 << 30), ("max\n", 7), (None, 7)])
def test_a_containers_limit_is_the_memory_there_is(tmp_path: Path, text: str | None, limit: int) -> None:
    path = tmp_path / "memory.max"
    if text is not None:
        path.write_text(text)
    assert hardware.container_limit(path, otherwise=7) == limit


def test_a_hanging_driver_does_not_hold_the_reader_up() -> None:
    hanging = threading.Event()
    answers = [facts()]

    def read() -> NodeFacts:
        if not answers:
            hanging.set()
            threading.Event().wait()  # for ever, in a daemon thread
        return answers.pop()

    watch = hardware.FactsWatch(read, every=0)
    until(hanging.is_set)
    assert watch() == facts()


class FakeNvml:
    """Two cards as NVML tells of them; `broken`: the driver fails half way."""

    class Memory:
        total, free = 80 << 30, 60 << 30

    class Process:
        def __init__(self, pid: int, memory: int | None) -> None:
            self.pid, self.usedGpuMemory = pid, memory

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pids: list[int], *, broken: bool = False) -> None:
        answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlSystemGetDriverVersion": lambda: "570.1",
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetMemoryInfo": lambda handle: self.Memory,
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}".encode(),
            "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
            "nvmlDeviceGetComputeRunningProcesses": lambda handle: [self.Process(p, None) for p in pids if handle == 1],
        }
        for name, answer in answers.items():
            monkeypatch.setattr(pynvml, name, answer)
        if broken:
            monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", self.fail)

    @staticmethod
    def fail(handle: int) -> str:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)


def test_gpus_and_who_else_is_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as engine:
        FakeNvml(monkeypatch, [engine.pid, os.getpid(), 1 << 22])
        gpus, driver = hardware.read_gpus({engine.pid})
        engine.communicate(b"\n")
    assert driver == "570.1"
    assert [(gpu.index, gpu.uuid, gpu.name) for gpu in gpus] == [
        (0, "GPU-0", "NVIDIA H200"),
        (1, "GPU-1", "NVIDIA H200"),
    ]
    assert gpus[0].foreign == ()
    assert [(one.pid, one.memory_bytes) for one in gpus[1].foreign] == [(os.getpid(), 0), (1 << 22, 0)]
    assert gpus[1].memory_free_bytes == 60 << 30


def test_a_driver_that_fails_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(monkeypatch, [], broken=True)
    assert hardware.read_gpus(()) == ((), "")
