"""Forward and backward pass together, as training calls them: writes `results/<device>/forward_backward.csv`.

python -m benchmarks.forward_backward [--only '*-d128-causal'] [--impls flashgen,flex] [--append]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import backward
from benchmarks.backward import TrainingRace
from benchmarks.suites import BOTH_PASSES
from benchmarks.training_impls import FORWARD_BACKWARD, together

RACE = TrainingRace(
    suite=BOTH_PASSES, about=(__doc__ or "").split("\n", maxsplit=1)[0], impls=FORWARD_BACKWARD, wrap=together
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done, 4 if flashgen has no row where it should have one, 3 stopped at the time limit."""
    return backward.main(arguments, RACE)


if __name__ == "__main__":
    sys.exit(main())
