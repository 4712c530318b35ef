"""What this machine is and has: address, cores, memory, disk, GPUs and who else uses them. Reads, never changes."""

from __future__ import annotations

import ipaddress
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from controlplane.fleet.addresses import node_address
from controlplane.fleet.errors import InvalidInput
from controlplane.fleet.model import ForeignProcess, GpuFacts, NodeFacts, Runtime

log = logging.getLogger(__name__)

SHARED_MEMORY = "/dev/shm"  # noqa: S108 (its size is read, nothing is put there)


def choose_address(configured: str, control_plane: str) -> str:
    """The one address on which this node's engines listen.

    `configured` (TANDEM_NODE_ADDRESS) wins; beside a control plane on loopback it is 127.0.0.1; else the local address
    of the route to it. Raises `InvalidInput` for a wildcard, a name, or an address that this machine does not have.
    """
    host = urlsplit(control_plane).hostname or "127.0.0.1"
    address = configured or ("127.0.0.1" if _is_loopback(host) else _address_towards(host))
    try:
        node_address(address)
    except InvalidInput as error:
        raise InvalidInput(f"TANDEM_NODE_ADDRESS: {error.message}", field="node_address") from None
    if not has_address(address):
        raise InvalidInput(f"TANDEM_NODE_ADDRESS: {address} is not an address of this machine", field="node_address")
    return address


def has_address(address: str) -> bool:
    """Whether it is an address of this machine now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _address_towards(host: str) -> str:
    """The local address from which packets to the host leave. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except socket.gaierror as error:
            raise InvalidInput(
                f"the control plane's host {host} is not found ({error.strerror}): correct its name, or write its IPv4 address",
                field="join",
            ) from None
        except OSError as error:
            raise InvalidInput(
                f"no route to {host} ({error.strerror}); set TANDEM_NODE_ADDRESS to this node's private address",
                field="node_address",
            ) from None
        return str(probe.getsockname()[0])


def read_facts(
    address: str,
    *,
    disk: Path,
    engine_pids: Collection[int],
    runtimes: Callable[[tuple[GpuFacts, ...]], tuple[Runtime, ...]],
) -> NodeFacts:
    """The machine as it is now. `disk`: the folder whose free space counts; `runtimes`: what these GPUs can run."""
    memory = psutil.virtual_memory()
    limit = container_limit(Path("/sys/fs/cgroup/memory.max"), otherwise=memory.total)
    gpus, driver = read_gpus(engine_pids)
    return NodeFacts(
        address=address,
        hostname=socket.gethostname(),
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=min(memory.total, limit),
        memory_free_bytes=min(memory.available, limit),
        shm_bytes=shutil.disk_usage(SHARED_MEMORY).total,
        disk_free_bytes=_disk_free(disk),
        gpus=gpus,
        native_bf16=has_native_bf16(Path("/proc/cpuinfo").read_text()),
        interface=interface_of(address),
        driver=driver,
        agent_version=agent_version(),
        runtimes=runtimes(gpus),
    )


def interface_of(address: str) -> str:
    """The network interface that has this address, or empty. Every 127.x.y.z belongs to the loopback interface."""
    for name, addresses in psutil.net_if_addrs().items():
        for own in addresses:
            if own.family is not socket.AF_INET:
                continue
            if own.address == address or (_is_loopback(own.address) and _is_loopback(address)):
                return name
    return ""


def container_limit(path: Path, *, otherwise: int) -> int:
    """Bytes that this control group may use; `otherwise` where there is no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return otherwise
    return int(text) if text.isdigit() else otherwise


class FactsWatch:
    """The newest facts without waiting: a sick GPU driver may hang for minutes, and the loop must not."""

    def __init__(self, read: Callable[[], NodeFacts], *, every: float = 10.0) -> None:
        self._read = read
        self._every = every
        self._facts = read()
        threading.Thread(target=self._run, name="facts", daemon=True).start()

    def __call__(self) -> NodeFacts:
        return self._facts

    def _run(self) -> None:
        while True:
            time.sleep(self._every)
            try:
                self._facts = self._read()
            except Exception:
                log.exception("This machine's facts could not be read; the last ones stay.")


def agent_version() -> str:
    try:
        return version("tandem")
    except PackageNotFoundError:
        return ""


def has_native_bf16(cpuinfo: str) -> bool:
    """Whether the CPU multiplies bfloat16 itself: x86's avx512_bf16 or amx_bf16, Arm's bf16."""
    for line in cpuinfo.splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags.split())
    return False


def _disk_free(folder: Path) -> int:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def read_gpus(engine_pids: Collection[int]) -> tuple[tuple[GpuFacts, ...], str]:
    """NVIDIA GPUs by NVML and the driver's version; nothing where there is no driver. MIG slices are left alone."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return (), ""
    try:
        gpus = tuple(_gpu(index, engine_pids) for index in range(pynvml.nvmlDeviceGetCount()))
        return gpus, _text(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return (), ""
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int, engine_pids: Collection[int]) -> GpuFacts:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    foreign = tuple(
        ForeignProcess(pid=process.pid, name=_process_name(process.pid), memory_bytes=process.usedGpuMemory or 0)
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        if not _is_ours(process.pid, engine_pids)
    )
    return GpuFacts(
        index=index,
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(memory.total),
        memory_free_bytes=int(memory.free),
        foreign=foreign,
    )


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _process_name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "another container's process"


def _is_ours(pid: int, engine_pids: Collection[int]) -> bool:
    """An engine's helpers are in its session."""
    try:
        return os.getsid(pid) in engine_pids
    except OSError:
        return False
