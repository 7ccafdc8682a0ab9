"""A command line of before a knob was renamed is told what the knob is called now."""

from __future__ import annotations

import pytest

from flashgen.cli.arguments import parse_config
from flashgen.codegen.families import FAMILIES
from flashgen.codegen.family import KernelFamily, Knob
from flashgen.core.device import find_device
from flashgen.core.errors import ConfigError
from flashgen.core.workload import Specialization

H200 = find_device("h200")
RENAMED = [(row, knob) for row in FAMILIES for knob in row.knobs if knob.former]


@pytest.mark.parametrize(("row", "knob"), RENAMED, ids=lambda value: value.id if hasattr(value, "id") else value.former)
def test_a_former_name_is_answered_with_the_present_one(row: KernelFamily, knob: Knob) -> None:
    spec = Specialization.parse(f"{'fwd' if row.direction == 'forward' else 'bwd'}-bf16-d128")
    with pytest.raises(ConfigError, match=f"{knob.former} is {knob.name} now"):
        parse_config(f"{row.id}:{knob.former}={knob.values[0]}", spec, H200)
    config = parse_config(f"{row.id}:{knob.name}={knob.values[0]}", spec, H200)
    assert config[knob.name] == knob.values[0]


def test_no_knob_has_the_former_name_of_another_one() -> None:
    assert RENAMED
    for row, knob in RENAMED:
        assert knob.former not in {other.name for other in row.knobs}
