"""`python -m controlplane.web`: the web process, dashboard and REST, as its settings say."""

from __future__ import annotations

import errno
import os
import socket
import sys
from typing import Any

import uvicorn

from controlplane import door
from controlplane.fleet import config, program
from controlplane.fleet.addresses import bracketed
from controlplane.fleet.config import Config
from controlplane.fleet.errors import InvalidInput

GRACE_SECONDS = 5


def options(settings: Config) -> dict[str, Any]:
    """Of `uvicorn.Config`."""
    return {
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
    settings = config.load()
    listening = bind(settings.bind, settings.web_port)
    served = uvicorn.Config("controlplane.asgi:application", **options(settings))
    served.load()
    print(f"Dashboard: http://{bracketed(settings.bind)}:{settings.web_port}", flush=True)
    uvicorn.Server(served).run(sockets=[listening])
    return 0


def bind(host: str, port: int) -> socket.socket:
    """The listening socket. Raises `InvalidInput` naming the variable that chooses another address or port."""
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048
        )
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise InvalidInput(f"TANDEM_BIND: {host} is not an address of this machine", field="TANDEM_BIND") from None
        raise InvalidInput(
            f"TANDEM_WEB_PORT: port {port} of {host} cannot be used ({os.strerror(error.errno or 0)})",
            field="TANDEM_WEB_PORT",
        ) from None


if __name__ == "__main__":
    sys.exit(main())
