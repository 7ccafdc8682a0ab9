"""docs/supported.md says what the families table says, and a `yes` has a default configuration behind it."""

from __future__ import annotations

import re

from flashgen.codegen.families import FAMILIES, invalid, unsupported
from scripts.supported import DEVICES, PAGE, groups, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs`"


def test_every_architecture_of_the_catalogue_has_a_column() -> None:
    assert [device.arch for device in DEVICES] == [
        *("sm80", "sm86", "sm89", "sm90", "sm100", "sm120"),
        *("gfx942", "gfx1200"),
    ]
    for device in DEVICES:
        assert device.arch in page()


def test_a_yes_has_a_default_configuration() -> None:
    for family in FAMILIES:
        for device in DEVICES:
            for row in (row for group in groups(family.direction).values() for row in group):
                if unsupported(family, row.spec, device) is None:
                    default = family.default(row.spec, device)
                    assert invalid(default, row.spec, device) is None, (row.name, device.arch, default)


def test_both_passes_have_a_table_and_a_family_is_asked_for_its_own() -> None:
    text = page()
    assert [text.count(f"## {name} pass, any family") for name in ("Forward", "Backward")] == [1, 1]
    for family in FAMILIES:
        section = text.split(f"## `{family.id}`")[1].split("\n## ")[0]
        assert f"{family.title}: {family.direction} pass" in section
        assert ("the same bits every time" in section) == (family.direction == "backward")
    assert "computes the" not in text  # the other pass is no row


def test_every_number_has_its_reason() -> None:
    for section in page().split("\n## ")[3:]:
        cells = [cell for line in section.splitlines() if line[:1] == "|" for cell in line.split("|")[2:]]
        numbers = {int(cell) for cell in cells if cell.strip().isdecimal()}
        listed = {int(match) for match in re.findall(r"^(\d+)\. \w", section, re.MULTILINE)}
        assert numbers == listed
