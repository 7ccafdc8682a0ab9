"""What tells a tuning database from other files: the marks in its header, its schema version, and its tables.

Apart from `flashgen.db.schema`, so that a look-up, which reads with plain SQL, loads no SQLAlchemy.
"""

from __future__ import annotations

APPLICATION_ID = 0x464C474E
"""`FLGN` in the header of every file of ours (PRAGMA application_id): tells a foreign SQLite file at once."""

SCHEMA_VERSION = "0010"
"""The newest revision in `migrations/versions`; revisions are four digits and compare as numbers."""

TABLES = frozenset(
    {"anchors", "devices", "finalists", "history", "origins", "records", "searches", "trials", "workloads"}
)
"""Every table of `flashgen.db.schema` (a test compares)."""
