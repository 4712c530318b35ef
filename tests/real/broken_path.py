"""A relay before a real engine that breaks just what it is told to: what else the engine says stays its own."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from tests.conftest import free_port
from tests.real.engines import ADDRESS

Change = Callable[[dict[str, Any]], None]
"""What becomes of the body of a completion, in place."""
_ENDS = frozenset(("content-length", "transfer-encoding", "connection", "host", "date", "server"))


def refuse_transfers(body: dict[str, Any]) -> None:
    """The engine finds another one than it was told of: its handshake fails, and vLLM answers 500."""
    if params := body.get("kv_transfer_params"):
        params["remote_engine_id"] = str(uuid.uuid4())


def drop_params(body: dict[str, Any]) -> None:
    """The engine is never told of the KV: it computes the prompt itself and answers 200."""
    body.pop("kv_transfer_params", None)


class BrokenPath:
    """An engine's address behind which `change` is applied to every completion; None: all is well."""

    def __init__(self, engine_url: str) -> None:
        self.engine_url = engine_url
        self.url = f"http://{ADDRESS}:{free_port()}"
        self.change: Change | None = None
        self.asked = 0
        """Completions with KV transfer parameters that came by."""


@contextmanager
def broken_path(engine_url: str) -> Iterator[BrokenPath]:
    path = BrokenPath(engine_url)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._relay(b"")

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            body = json.loads(data)
            path.asked += bool(body.get("kv_transfer_params"))
            if path.change is not None:
                path.change(body)
            self._relay(json.dumps(body).encode())

        def _relay(self, data: bytes) -> None:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _ENDS}
            with (
                httpx.Client(trust_env=False, timeout=60) as client,
                client.stream(self.command, path.engine_url + self.path, content=data, headers=headers) as reply,
            ):
                self.send_response(reply.status_code)
                for name, value in reply.headers.items():
                    if name not in _ENDS:
                        self.send_header(name, value)
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                for chunk in reply.iter_raw():
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
                self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer((ADDRESS, int(path.url.rsplit(":", 1)[1])), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield path
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
