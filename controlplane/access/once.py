"""What was sent twice is done once. A form carries a token that was made with it, a REST call an `Idempotency-Key`: the second
time the first result comes back.

A secret that was made is shown again for a while, and yet is stored nowhere: it is derived from the token, which only the
sender has, and from this site's secret key.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.utils import timezone

from controlplane.access.models import Submission
from controlplane.access.roles import Actor
from controlplane.fleet.errors import Conflict, InvalidInput

KEPT = timedelta(days=1)
"""For which a token is remembered."""
SHOWN_AGAIN = timedelta(minutes=10)
"""For which a secret that was made is shown once more to the same sender."""
LONGEST_TOKEN = 200


class Once:
    """One sending. Make it inside the transaction of the change; where that fails, the token may be used again."""

    def __init__(self, actor: Actor, action: str, token: str, contents: Any) -> None:
        """`token`: empty: nothing is remembered. `contents`: what was sent, as JSON can say it.

        Raises `InvalidInput` (the token), or `Conflict` where the token came with other contents before.
        """
        if len(token) > LONGEST_TOKEN or not token.isascii() or not token.isprintable():
            raise InvalidInput(
                f"Idempotency-Key: send 1 to {LONGEST_TOKEN} printable ASCII characters", field="Idempotency-Key"
            )
        self._token = f"{actor.kind}\n{actor.name}\n{action}\n{token}" if token else ""
        self._row: Submission | None = None
        if not token:
            return
        now = timezone.now()
        Submission.objects.filter(at__lt=now - KEPT).delete()
        fingerprint = _digest(json.dumps(contents, sort_keys=True, default=str))
        self._row, first = Submission.objects.get_or_create(
            digest=_digest(self._token), defaults={"contents": fingerprint, "salt": secrets.token_hex(16)}
        )
        if not first and self._row.contents != fingerprint:
            raise Conflict(
                f"this was sent before with other contents, at {self._row.at:%R} UTC, and made {self._row.target}. "
                "Nothing was changed now; send it again to make another"
            )

    @property
    def target(self) -> str:
        """What the first sending made; empty: this is the first."""
        return self._row.target if self._row else ""

    def made(self, target: str) -> None:
        """Remember what this sending made."""
        if self._row:
            self._row.target = target
            self._row.save(update_fields=["target"])

    def secret(self) -> str:
        """256 bits as text: random, or what the first sending got. Raises `Conflict` when that is long ago."""
        if self._row is None:
            return secrets.token_urlsafe(32)
        if self.target and timezone.now() - self._row.at > SHOWN_AGAIN:
            raise Conflict(
                f"this was sent before, at {self._row.at:%R} UTC. Its secret was shown then and cannot be shown again"
            )
        words = f"{self._row.salt}\n{self._token}".encode()
        derived = hmac.digest(settings.SECRET_KEY.encode(), words, "sha256")
        return base64.urlsafe_b64encode(derived).rstrip(b"=").decode()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
