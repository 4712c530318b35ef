"""`manage.py createadmin [--reset]`: the user `admin` with a generated password, shown once."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from controlplane.access import first_start


class Command(BaseCommand):
    help = "Create the user admin. The generated password alone goes to stdout, once; only its hash is kept."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--reset", action="store_true", help="make a new password if the old one is lost")

    def handle(self, *, reset: bool, **options: Any) -> None:
        password = first_start.create_admin(reset=reset)
        if password is None:
            raise CommandError("The user admin exists. If its password is lost, --reset makes a new one.")
        self.stderr.write("User admin; its password, shown this once:", self.style.NOTICE)
        self.stdout.write(password)
