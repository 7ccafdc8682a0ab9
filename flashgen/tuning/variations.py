"""Knobs changed in configs that are known: what a knob that is new gains, where nobody wants to search again."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.families import DECODE_FAMILIES, FAMILIES, family, invalid
from flashgen.codegen.family import Knob
from flashgen.core import checks
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.errors import TuningError
from flashgen.core.names import meant
from flashgen.core.quoting import shown
from flashgen.core.workload import Specialization


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """Values of some knobs, as pairs of texts; for configs of any family that declares all of them."""

    changes: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, given: str) -> Variation:
        """Read `early_settle=true,exp_order=barrier`.

        Raises:
            TuningError: the text is of another form, or no kernel family declares these knobs with these values.
        """
        text = checks.text("a variation", given, TuningError)
        parts = (part.partition("=") for part in text.split(","))
        found = cls(changes=tuple((name.strip(), value.strip()) for name, _, value in parts))
        names = [name for name, _ in found.changes]
        if not all(name and value for name, value in found.changes) or len(set(names)) < len(names):
            raise TuningError(f"a variation is knob=value,... with each knob once, got {shown(text)}")
        rows = (*FAMILIES, *DECODE_FAMILIES)
        if not any(found._values(row.knobs) for row in rows):
            known = sorted({knob.name for row in rows for knob in row.knobs})
            likely = "".join(meant(name, known) for name in names if name not in known)
            raise TuningError(f"no kernel family has all of these knobs and values: {shown(text)}{likely}")
        return found

    def of(self, config: Config, spec: Specialization, device: Device) -> Config | None:
        """`config` with the changes, or None where its family has no such knobs, or the result is not valid."""
        values = self._values(family(config.family).knobs)
        changed = config.replace(**values) if values else config
        return None if changed == config or invalid(changed, spec, device) is not None else changed

    def _values(self, knobs: tuple[Knob, ...]) -> dict[str, KnobValue]:
        """The changes as values of `knobs`; empty if one is not declared."""
        declared = {knob.name: knob for knob in knobs}
        found = {name: declared[name].read(text) for name, text in self.changes if name in declared}
        values = {name: value for name, value in found.items() if value is not None}
        return values if len(values) == len(self.changes) else {}

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self.changes)
