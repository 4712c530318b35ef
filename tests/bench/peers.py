"""`python -m tests.bench.peers`: installs the routers that the bench measures beside ours, each into an environment of its
own below the user's cache. `make bench` measures those it finds; none is needed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from controlplane.fleet import config

VLLM_ROUTER = "vllm-router==0.1.17"
DYNAMO = "1.6.1"
STEPS: dict[str, Sequence[Sequence[str]]] = {
    "vllm-router": [(VLLM_ROUTER,)],
    # Dynamo asks for `aisimulate`, which the public index does not have: what else it needs is named here.
    "dynamo": [
        ("--no-deps", f"ai-dynamo=={DYNAMO}", f"ai-dynamo-runtime=={DYNAMO}"),
        (
            "aiohttp<4", "kubernetes<33", "msgspec", "prometheus-client<1", "pydantic<=2.13.5", "pyzmq", "redis<9",
            "transformers", "zstandard<1", "uvloop",
        ),
    ],
}  # fmt: skip


def folder(peer: str) -> Path:
    return config.load().cache_path() / "bench" / peer


def python(peer: str) -> Path | None:
    """The peer's interpreter; None: it is not installed."""
    found = folder(peer) / "bin" / "python"
    return found if (folder(peer) / "installed").exists() else None


def install(peer: str) -> None:
    """Raises `CalledProcessError` with what pip said."""
    where = folder(peer)
    pip = (where / "bin" / "pip", "install", "--quiet")
    for command in ((sys.executable, "-m", "venv", "--clear", where), *((*pip, *step) for step in STEPS[peer])):
        subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    (where / "installed").touch()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[*STEPS], help="this one alone")
    only = parser.parse_args().only
    failed = 0
    for peer in [only] if only else STEPS:
        if python(peer) is not None:
            print(f"{peer}: installed already")
            continue
        print(f"{peer}: installing into {folder(peer)}", flush=True)
        try:
            install(peer)
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"{peer}: {getattr(error, 'output', None) or error}", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
