"""Modules that take long to import, and that neither an import of flashgen nor a look-up loads."""

from __future__ import annotations

HEAVY = ("triton", "jinja2", "sqlalchemy", "alembic", "optuna", "typer", "rich", "yaml")
