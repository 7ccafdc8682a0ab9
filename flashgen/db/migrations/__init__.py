"""Revisions of the tables (alembic), run from `flashgen.db.files`; there is no alembic.ini.

A file is migrated when it is opened for writing; of a file that can only be read, a copy is. To add a revision, copy
the newest file of `versions`, give it the next number and its reason, change `flashgen.db.schema`, and add a file of
the previous version to tests/db/data.
"""
