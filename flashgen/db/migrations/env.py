"""What alembic runs to apply revisions: on the open connection it is given, inside that connection's transaction."""

from __future__ import annotations

from alembic import context

from flashgen.db.schema import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,  # SQLite cannot alter most things in place
    transactional_ddl=True,  # it can roll back DDL, which alembic does not assume
)
with context.begin_transaction():
    context.run_migrations()
