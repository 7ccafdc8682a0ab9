"""Programs that import flash_attn get flashgen's functions where that is asked for, and only there."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest

from flashgen import flash_attn, flash_attn_interface
from flashgen.core.errors import UnsupportedError
from flashgen.flash_attn import bert_padding
from flashgen.flash_attn.installation import NAMES

pytestmark = pytest.mark.usefixtures("on_reference")

ROOTS = ("flash_attn", "flash_attn_interface")


@pytest.fixture
def without_flash_attn() -> Iterator[None]:
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ROOTS}
    for name in before:
        del sys.modules[name]
    yield
    flash_attn.uninstall()
    flash_attn_interface.uninstall()
    sys.modules.update(before)


@pytest.mark.usefixtures("without_flash_attn")
def test_programs_that_import_flash_attn_get_these_functions() -> None:
    flash_attn.install()
    flash_attn.install()
    found = [importlib.import_module(name) for name in NAMES]
    assert found[0].flash_attn_func is flash_attn.flash_attn_func
    assert found[1].flash_attn_varlen_func is flash_attn.flash_attn_varlen_func
    assert found[2].pad_input is bert_padding.pad_input
    layers = importlib.import_module("flash_attn.layers.rotary")
    assert layers is importlib.import_module("flashgen.flash_attn.layers.rotary")
    flash_attn.uninstall()
    assert not {*NAMES} & {*sys.modules}


@pytest.mark.usefixtures("without_flash_attn")
def test_programs_that_look_for_version_3_find_it_where_it_is_asked_for() -> None:
    other = type(sys)("flash_attn_interface")
    flash_attn.install()
    assert "flash_attn_interface" not in sys.modules
    sys.modules["flash_attn_interface"] = other
    with pytest.raises(UnsupportedError, match="another flash_attn_interface is imported"):
        flash_attn_interface.install()
    flash_attn_interface.install(force=True)
    flash_attn.uninstall()
    assert importlib.import_module("flash_attn_interface") is flash_attn_interface
    flash_attn_interface.uninstall()
    assert sys.modules.pop("flash_attn_interface") is other
    flash_attn_interface.install()
    flash_attn_interface.uninstall()
    assert "flash_attn_interface" not in sys.modules


@pytest.mark.usefixtures("without_flash_attn")
def test_another_flash_attn_is_replaced_only_by_force() -> None:
    other, part = type(sys)("flash_attn"), type(sys)("flash_attn.ops")
    sys.modules |= {"flash_attn": other, "flash_attn.ops": part}
    with pytest.raises(UnsupportedError, match=r"install\(force=True\)"):
        flash_attn.install()
    assert sys.modules["flash_attn"] is other
    flash_attn.install(force=True)
    assert sys.modules["flash_attn"] is flash_attn
    assert "flash_attn.ops" not in sys.modules
    flash_attn.uninstall()
    assert (sys.modules["flash_attn"], sys.modules["flash_attn.ops"]) == (other, part)
    del sys.modules["flash_attn"], sys.modules["flash_attn.ops"]


@pytest.mark.usefixtures("without_flash_attn")
def test_what_a_program_imports_below_the_package_is_in_nobodys_way() -> None:
    flash_attn.install()
    importlib.import_module("flash_attn.passes")
    flash_attn.install()
    flash_attn.uninstall()
    assert not [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]
    flash_attn.install()


@pytest.mark.usefixtures("without_flash_attn")
def test_a_name_that_a_program_has_blocked_is_one_that_nobody_has_imported() -> None:
    sys.modules["flash_attn"] = None  # type: ignore[assignment]
    flash_attn.install()
    assert importlib.import_module("flash_attn") is flash_attn
    flash_attn.uninstall()
    assert sys.modules["flash_attn"] is None
