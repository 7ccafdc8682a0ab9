"""flashgen's functions under FlashAttention's names, for programs that import it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType

from flashgen.core.errors import UnsupportedError

NAMES = {
    "flash_attn": "flashgen.flash_attn",
    "flash_attn.flash_attn_interface": "flashgen.flash_attn.flash_attn_interface",
    "flash_attn.bert_padding": "flashgen.flash_attn.bert_padding",
    "flash_attn.layers": "flashgen.flash_attn.layers",
    "flash_attn.layers.rotary": "flashgen.flash_attn.layers.rotary",
}
"""Names in `sys.modules`, and the modules that they get."""

NAMES_3 = {"flash_attn_interface": "flashgen.flash_attn_interface"}
"""The same of version 3."""

_replaced: dict[str, ModuleType] = {}
_FOLDER = Path(__file__).parents[1]


def install(*, force: bool = False) -> None:
    """Put these modules under the names `flash_attn`, `.flash_attn_interface`, `.bert_padding` and `.layers.rotary`.

    It holds for imports from then on, in this process; doing it twice is doing it once. Other modules of the real
    package (`flash_attn.ops`, `flash_attn.modules`) cannot be imported while it holds.

    Args:
        force: also where another `flash_attn` is imported already. Functions that a program has taken from it stay
            what they are.

    Raises:
        UnsupportedError: another one is imported, and `force` is False.
    """
    put(NAMES, "flash_attn", force=force)


def uninstall() -> None:
    """Take the modules away again, and put those back that `install(force=True)` has replaced."""
    take_back("flash_attn")


def put(names: Mapping[str, str], root: str, *, force: bool) -> None:
    """Put modules under names, in place of all others below a root.

    Args:
        names: what each name gets.
        root: the package whose names they are.
        force: also where another one is imported.

    Raises:
        UnsupportedError: another one is imported, and `force` is False.
    """
    mine = {name: import_module(target) for name, target in names.items()}
    others = {name: module for name, module in sys.modules.items() if _is_below(name, root) and not _is_own(module)}
    # None stands for a name that a program has blocked: nothing is imported there
    if any(module is not None for module in others.values()) and not force:
        raise UnsupportedError(
            f"another {root} is imported already, {getattr(others.get(root), '__file__', None)}: call "
            "install() before the program imports it, or install(force=True) to replace it"
        )
    for name in others:
        _replaced[name] = sys.modules.pop(name)
    sys.modules.update(mine)


def take_back(root: str) -> None:
    """Take modules away from names below a root, and put back what they have replaced."""
    for name in [name for name, module in sys.modules.items() if _is_below(name, root) and _is_own(module)]:
        del sys.modules[name]  # of `put`, and what a program has imported below the package besides
    for name in [name for name in _replaced if _is_below(name, root)]:
        sys.modules[name] = _replaced.pop(name)


def _is_own(module: ModuleType | None) -> bool:
    """Whether a module is of flashgen's folder, whatever its name is: so are submodules of a package that was put."""
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and Path(file).is_relative_to(_FOLDER)


def _is_below(name: str, root: str) -> bool:
    return name == root or name.startswith(f"{root}.")
