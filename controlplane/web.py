"""`python -m controlplane.web`: the web process, dashboard and REST, as its settings say."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn

from controlplane import door
from controlplane.fleet import config, program
from controlplane.fleet.config import Config

GRACE_SECONDS = 5


def options(settings: Config) -> dict[str, Any]:
    """Of `uvicorn.run`."""
    return {
        "host": settings.bind,
        "port": settings.web_port,
        "http": door.Protocol,
        "h11_max_incomplete_event_size": door.MOST_HEAD_BYTES,
        "limit_concurrency": door.MOST_CONNECTIONS,
        "ws_max_size": door.MOST_BYTES,
        "lifespan": "off",
        "access_log": False,
        "server_header": False,
        # The documented proxy, on this machine, tells the client's address and scheme; nobody else is believed.
        "proxy_headers": bool(settings.public_url),
        "forwarded_allow_ips": "127.0.0.1,::1",
        "timeout_graceful_shutdown": GRACE_SECONDS,
        "log_level": settings.log_level,
    }


def main() -> int:
    """Serve until SIGTERM or SIGINT."""
    program.begin("controlplane.web")
    program.keep_files_private()
    uvicorn.run("controlplane.asgi:application", **options(config.load()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
