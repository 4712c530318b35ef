"""Why the database cannot be used, as a sentence for the person who started a program."""

from __future__ import annotations

from django.db import DatabaseError

from controlplane.fleet import config


def sentence(error: DatabaseError) -> str:
    """Names the variable that says where the database is; never its password, which no driver tells."""
    said = " ".join(str(error).split())
    if "no such table" in said or 'relation "' in said:
        said = "the database has not been prepared: `make up` does that, or `.venv/bin/python manage.py migrate`"
    return f"{'DATABASE_URL' if config.load().database_url else 'TANDEM_HOME'}: {said}"
