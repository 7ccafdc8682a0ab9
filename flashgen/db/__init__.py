"""The tuning database: what a search found out, kept in SQLite files and distrusted on the way back.

This room alone knows SQLAlchemy and alembic. Others meet `store.Store` (one file), `layers.Layers` (the user's
file over the shipped ones) and `exchange` (export, import, CSV), which speak in the values of `flashgen.core`.
"""
