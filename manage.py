#!/usr/bin/env python
"""Django's command line for the control plane."""

import os
import sys

from controlplane.fleet import program


def main() -> None:
    program.begin("manage.py")
    program.keep_files_private()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    from django.core.management import execute_from_command_line
    from django.db import DatabaseError

    try:
        execute_from_command_line(sys.argv)
    except DatabaseError as error:
        from controlplane import database

        sys.exit(f"manage.py: {database.sentence(error)}")


if __name__ == "__main__":
    main()
