"""`manage.py jointoken`: a one-time token with which one agent may join, shown once."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from controlplane.access.roles import SYSTEM
from controlplane.fleet.errors import TandemError
from controlplane.nodes import services
from controlplane.nodes.joining import join_address


class Command(BaseCommand):
    help = "Create a join token for one node. The token alone goes to stdout, once; only its digest is kept."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--hours", type=int, default=1, help="how long it may be used (default: 1)")
        parser.add_argument("--node", default="", help="the only name it is good for (default: any new name)")
        parser.add_argument("--address", default="", help="of the node's engines, if the node asks from another")

    def handle(self, *, hours: int, node: str, address: str, **options: Any) -> None:
        try:
            token = services.create_join_token(actor=SYSTEM, hours=hours, node=node, address=address)
        except TandemError as error:
            raise CommandError(error.message) from None
        at = join_address()
        self.stderr.write(
            f"On the node, within {hours} h, with this token in TANDEM_JOIN_TOKEN:\n"
            f"  .venv/bin/python -m workers --join {at.url}",
            self.style.NOTICE,
        )
        if at.note:
            self.stderr.write(at.note)
        self.stdout.write(token)
