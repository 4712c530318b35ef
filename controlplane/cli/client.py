"""The REST client of `tandem`: one method, every failure a sentence. Prints nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self
from urllib.parse import quote

import httpx

from controlplane.fleet.errors import TandemError
from controlplane.fleet.outbound import proxy_for

LONGEST_WAIT = 30.0
"""Seconds until an answer is given up."""


class Refused(TandemError):
    """The control plane said no, or something in between did. `status` is the HTTP status."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        field: str | None = None,
        retryable: bool = False,
        sentences: Sequence[str] = (),
    ) -> None:
        super().__init__(message, field=field)
        self.status = status
        self.retryable = retryable
        self._sentences = tuple(sentences) or (message,)

    @property
    def sentences(self) -> tuple[str, ...]:
        return self._sentences


class Unreachable(TandemError):
    """There is no answer at all; trying again may help."""

    retryable = True


class Client:
    """One control plane. Safe to use from several threads."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.Client(
            base_url=f"{self.url}/api/v1/",
            headers={"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(LONGEST_WAIT, connect=10),
            transport=httpx.HTTPTransport(proxy=proxy_for(self.url)),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.close()

    def call(self, method: str, *path: str, body: Any = None, **query: Any) -> Any:
        """The decoded answer, None for an empty one. Raises `Refused` or `Unreachable`."""
        try:
            response = self._http.request(
                method, "/".join(quote(part, safe="") for part in path), json=body, params=query
            )
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise Unreachable(f"no answer from {self.url} ({error}): is it up, and is TANDEM_URL right?") from None
        if response.is_success:
            return _json(response) if response.content else None
        raise _refusal(response)


def _refusal(response: httpx.Response) -> Refused:
    status = response.status_code
    try:
        error = response.json()["error"]
        sentences = [str(problem["message"]) for problem in error.get("errors", ())]
        return Refused(
            error["message"],
            status=status,
            field=error["field"],
            retryable=error["retryable"],
            sentences=sentences,
        )
    except (ValueError, LookupError, TypeError):
        return Refused(
            f"{response.url.host} answered {status} without Tandem's error form: is TANDEM_URL the control plane's?",
            status=status,
            retryable=status in (502, 503, 504),
        )


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        raise Refused(
            f"{response.url.host} answered something else than JSON: is TANDEM_URL the control plane's?",
            status=response.status_code,
        ) from None
