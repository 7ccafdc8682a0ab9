"""The version of flashgen, stated once."""

__version__ = "0.1.0"
