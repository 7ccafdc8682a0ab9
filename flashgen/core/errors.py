"""The one error tree of flashgen.

    FlashgenError
    ├── WorkloadError (ValueError)             a shape, dtype or argument breaks a rule
    ├── DeviceError (ValueError)               no such device, or a device without what is needed
    ├── ConfigError (ValueError)               a knob is unknown or its value is not declared
    ├── UnsupportedError (NotImplementedError) no kernel family serves this workload here
    ├── BuildError (RuntimeError)              rendering or compiling a kernel failed
    ├── LaunchError (RuntimeError)             a kernel could not be launched now
    ├── DatabaseError (RuntimeError)           a tuning database is missing, foreign, corrupt or newer
    ├── MeasureError (RuntimeError)            a measurement could not be made
    ├── TuningError (RuntimeError)             a search ended without any valid candidate
    └── SettingError (ValueError)              an environment variable has an invalid value

Each message states the rule first and then the value that broke it.
"""

from __future__ import annotations

from flashgen.core.quoting import printable


class FlashgenError(Exception):
    """Base class of every error that flashgen raises on purpose.

    Its text may quote names, paths and files of others, and is escaped: none of it steers a terminal.
    """

    def __str__(self) -> str:
        return printable(super().__str__(), lines=True)


class WorkloadError(FlashgenError, ValueError):
    """A shape, dtype or argument breaks a rule of attention."""


class DeviceError(FlashgenError, ValueError):
    """The device is unknown, or lacks what was asked of it."""


class ConfigError(FlashgenError, ValueError):
    """A configuration names an unknown family or knob, or a value its knob does not declare."""


class UnsupportedError(FlashgenError, NotImplementedError):
    """No kernel family serves this workload on this device; the message lists each one's reason."""


class BuildError(FlashgenError, RuntimeError):
    """Rendering, importing or compiling a generated kernel failed."""


class LaunchError(FlashgenError, RuntimeError):
    """A kernel could not be launched in the present state of the process."""


class DatabaseError(FlashgenError, RuntimeError):
    """A tuning database is missing, foreign, corrupt, or newer than this flashgen."""


class MeasureError(FlashgenError, RuntimeError):
    """A measurement could not be made."""


class TuningError(FlashgenError, RuntimeError):
    """A search ended without any valid candidate; the message names every failure."""


class SettingError(FlashgenError, ValueError):
    """An environment variable holds a value that flashgen does not accept."""
