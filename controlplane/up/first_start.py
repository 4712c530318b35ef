"""What must be in the database before the programs start. Run as a process of its own: `make up` itself never loads Django.

`python -m controlplane.up.first_start` migrates, makes the administrator and the keys that are missing, writes a join token
for this machine's agent, and prints one line of JSON, `Prepared`. It is the only one that ever sees the password.
"""

from __future__ import annotations

import sys

import msgspec
from msgspec import Struct

from controlplane.fleet import config, program
from controlplane.fleet.this_node import this_node
from controlplane.up.state import StateFolder


class Prepared(Struct, frozen=True):
    database: str
    """`SQLite` or `PostgreSQL`, for people."""
    migrations: int
    """How many were applied now."""
    admin_password: str | None = None
    """Of the user `admin`, when it was made now. It is stored nowhere else."""
    demo_key_made: bool = False


def prepare(state: StateFolder) -> Prepared:
    """Bring the database up to date and fill in what is missing; whatever is there already stays as it is."""
    from django.core.management import call_command
    from django.db import connection
    from django.db.migrations.executor import MigrationExecutor

    executor = MigrationExecutor(connection)
    pending = len(executor.migration_plan(executor.loader.graph.leaf_nodes()))
    if pending:
        call_command("migrate", interactive=False, verbosity=0)

    from controlplane.access import first_start
    from controlplane.access.roles import SYSTEM, Role
    from controlplane.access.services import authenticate_key, create_key
    from controlplane.nodes.services import create_join_token

    password = first_start.create_admin()
    made = False
    if authenticate_key(state.read(state.demo_key)) is None:
        _, text = create_key(actor=SYSTEM, name="demo of make up", scope="inference")
        state.write(state.demo_key, text)
        made = True
    if authenticate_key(state.read(state.manage_key)) is None:
        _, text = create_key(actor=SYSTEM, name="make up itself", scope="manage", role=Role.OPERATOR)
        state.write(state.manage_key, text)
    settings = config.load()
    own_name = this_node(settings.node_name, settings.home_path())
    state.write(state.join_token, create_join_token(actor=SYSTEM, hours=1, node=own_name))
    return Prepared(connection.display_name, pending, password, made)


def main() -> int:
    program.begin("first_start")
    program.keep_files_private()
    import django
    from django.db import DatabaseError

    from controlplane import database

    try:
        django.setup()
        prepared = prepare(StateFolder(config.load().home_path()))
    except DatabaseError as error:
        print(database.sentence(error), file=sys.stderr)
        return 1
    print(msgspec.json.encode(prepared).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
