"""A model hub on loopback, as far as the hub client asks it: one small repository, whose answers can be made to fail."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "model.safetensors": b"s" * 24_000_000,
    "pytorch_model.bin": b"p" * 300_000,
    "model.gguf": b"g" * 1000,
    "original/consolidated.pth": b"o" * 1000,
    "tokenizer.json": b"{}",
}


class Hub:
    """Serves while entered. `refuse`: status and error code that every request gets."""

    def __init__(self) -> None:
        self.refuse: tuple[int, str] | None = None
        self.break_after: int | None = None
        """Bytes of a file after which the connection is cut, once."""
        self.asked: list[str] = []
        self.tokens: set[str] = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub.answer(self, head=True)

            def do_GET(self) -> None:
                hub.answer(self, head=False)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, *, head: bool) -> None:
        path = request.path.split("?")[0]
        self.asked.append(f"{request.command} {path} {request.headers.get('range', '')}".rstrip())
        self.tokens.add(request.headers.get("authorization", ""))
        if self.refuse is not None:
            status, code = self.refuse
            self._send(request, status, b"{}", {"X-Error-Code": code}, head=head)
        elif path.startswith("/api/models/org/name/tree/"):
            tree = [{"type": "file", "path": n, "size": len(d), "oid": self._etag(d)} for n, d in FILES.items()]
            self._send(request, 200, json.dumps(tree).encode(), {}, head=head)
        elif path.startswith("/api/models/org/name"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in FILES.items()]
            info = {"id": "org/name", "sha": COMMIT, "siblings": siblings}
            self._send(request, 200, json.dumps(info).encode(), {}, head=head)
        elif path.startswith("/org/name/resolve/"):
            self._file(request, FILES[path.split("/", 5)[5]], head=head)
        else:
            self._send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"}, head=head)

    def _file(self, request: BaseHTTPRequestHandler, data: bytes, *, head: bool) -> None:
        headers = {"ETag": f'"{self._etag(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start = int(request.headers.get("range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        if not head and self.break_after is not None and len(data) > self.break_after:
            part, self.break_after = data[: self.break_after], None
            request.send_response(200)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                request.send_header(name, value)
            request.end_headers()
            request.wfile.write(part)
            request.wfile.flush()
            request.close_connection = True
            return
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(request, 206 if start else 200, data[start:], headers, head=head)

    def _send(
        self, request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str], *, head: bool
    ) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        if not head:
            request.wfile.write(body)

    @staticmethod
    def _etag(data: bytes) -> str:
        return hashlib.sha1(data).hexdigest()
