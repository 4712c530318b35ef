"""How a program reaches the OpenAI endpoint: base URL, model, and the same request in curl, Python and JavaScript. Pure.

The key is never in it: programs read it from the environment, as `TANDEM_KEY`.
"""

from __future__ import annotations

import json
import shlex
from typing import NamedTuple

from django.conf import settings
from django.http import HttpRequest

from controlplane.fleet.addresses import is_loopback

MESSAGES = [{"role": "user", "content": "Say hello in five words."}]


class Connect(NamedTuple):
    base_url: str
    model: str
    """Served name."""
    local: bool
    """Only programs on the control plane's own machine reach it."""

    @property
    def snippets(self) -> tuple[tuple[str, str, str], ...]:
        """Id, title, text."""
        return (
            ("curl", "curl", self.curl),
            ("python", "Python", self.python),
            ("javascript", "JavaScript", self.javascript),
        )

    @property
    def curl(self) -> str:
        body = shlex.quote(json.dumps({"model": self.model, "messages": MESSAGES}, ensure_ascii=False))
        return (
            f"curl {shlex.quote(self.base_url + '/chat/completions')} \\\n"
            '  -H "Authorization: Bearer $TANDEM_KEY" -H "Content-Type: application/json" \\\n'
            f"  -d {body}"
        )

    @property
    def python(self) -> str:
        return (
            "import os\n\nfrom openai import OpenAI\n\n"
            f'client = OpenAI(base_url={json.dumps(self.base_url)}, api_key=os.environ["TANDEM_KEY"])\n'
            f"answer = client.chat.completions.create(\n    model={self._model},\n    messages={json.dumps(MESSAGES)},\n)\n"
            "print(answer.choices[0].message.content)"
        )

    @property
    def javascript(self) -> str:
        return (
            'import OpenAI from "openai";\n\n'
            f"const client = new OpenAI({{ baseURL: {json.dumps(self.base_url)}, apiKey: process.env.TANDEM_KEY }});\n"
            f"const answer = await client.chat.completions.create({{\n  model: {self._model},\n"
            f"  messages: {json.dumps(MESSAGES)},\n}});\nconsole.log(answer.choices[0].message.content);"
        )

    @property
    def _model(self) -> str:
        return json.dumps(self.model, ensure_ascii=False)


def connect(request: HttpRequest, model: str = "") -> Connect:
    """As the reader of this page reaches it. Without a model a word that stands for one."""
    base_url = settings.CONFIG.openai_url(request.get_host())
    return Connect(base_url, model or "MODEL", not settings.CONFIG.public_url and is_loopback(settings.CONFIG.bind))
