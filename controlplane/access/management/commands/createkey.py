"""`manage.py createkey --scope … --name …`: a new API key, shown once."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from controlplane.access import services
from controlplane.access.expiry import parse_expiry
from controlplane.access.limits import BOUNDS, UNLIMITED, changed, parse_limit
from controlplane.access.roles import SYSTEM, Role
from controlplane.fleet.errors import TandemError
from controlplane.fleet.wire import Scope


class Command(BaseCommand):
    help = "Create an API key. The key alone goes to stdout, once; only its digest is kept."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--scope",
            required=True,
            choices=[scope.value for scope in Scope],
            help="inference: /v1/; manage: REST and CLI",
        )
        parser.add_argument("--name", required=True, help="who uses it")
        parser.add_argument("--role", choices=[role.label for role in Role], help="manage keys only; default: viewer")
        parser.add_argument(
            "--model", action="append", default=[], help="served name it may use (repeatable); default: all"
        )
        parser.add_argument(
            "--expires", default="", help="30d, 12h, or a time such as 2030-01-31T12:00Z; default: never"
        )
        for field, (low, high) in BOUNDS.items():
            parser.add_argument(
                f"--{field.replace('_', '-')}", default="", help=f"inference keys only: {low} to {high}"
            )

    def handle(
        self, *, scope: str, name: str, role: str | None, model: list[str], expires: str, **options: Any
    ) -> None:
        try:
            key, text = services.create_key(
                actor=SYSTEM,
                name=name,
                scope=scope,
                role=Role[role.upper()] if role else None,
                models=model,
                expires_at=parse_expiry(expires),
                limits=changed(UNLIMITED, {field: parse_limit(options[field], field) for field in BOUNDS}),
            )
        except TandemError as error:
            raise CommandError("\n".join(error.sentences)) from None
        self.stderr.write(f"Key {key.id} ({key.name}), shown this once:", self.style.NOTICE)
        self.stdout.write(text)
