"""flashgen's functions under the name `flash_attn`, for programs that import it."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

from flashgen.core.errors import UnsupportedError

NAMES = {
    "flash_attn": "flashgen.flash_attn",
    "flash_attn.flash_attn_interface": "flashgen.flash_attn.flash_attn_interface",
    "flash_attn.bert_padding": "flashgen.flash_attn.bert_padding",
}
"""Names in `sys.modules`, and the modules that they get."""

_replaced: dict[str, ModuleType] = {}


def install(*, force: bool = False) -> None:
    """Put these modules under the names `flash_attn`, `.flash_attn_interface` and `.bert_padding`.

    It holds for imports from then on, in this process; doing it twice is doing it once. Other modules of the real
    package (`flash_attn.layers`, `flash_attn.ops`) cannot be imported while it holds.

    Args:
        force: also where another `flash_attn` is imported already. Functions that a program has taken from it stay
            what they are.

    Raises:
        UnsupportedError: another one is imported, and `force` is False.
    """
    mine = {name: import_module(target) for name, target in NAMES.items()}
    others = {
        name: module
        for name, module in sys.modules.items()
        if (name == "flash_attn" or name.startswith("flash_attn.")) and module is not mine.get(name)
    }
    if others and not force:
        raise UnsupportedError(
            f"another flash_attn is imported already, {getattr(others.get('flash_attn'), '__file__', None)}: call "
            "install() before the program imports it, or install(force=True) to replace it"
        )
    for name in others:
        _replaced[name] = sys.modules.pop(name)
    sys.modules.update(mine)


def uninstall() -> None:
    """Take the modules away again, and put those back that `install(force=True)` has replaced."""
    for name, target in NAMES.items():
        if sys.modules.get(name) is sys.modules.get(target):
            sys.modules.pop(name, None)
    sys.modules.update(_replaced)
    _replaced.clear()
