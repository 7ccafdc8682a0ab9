"""Every name in a rendered kernel is defined: Triton finds that out only when it compiles the very text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from flashgen.codegen import families
from flashgen.codegen.render import render
from flashgen.core.device import find_device
from flashgen.core.workload import Specialization
from tests.codegen.ruff import assert_passes
from tests.tiers import first

H200 = find_device("h200")
HEAD_DIMS = (40, *range(64, 257, 8))
FEW = (40, 64, 96, 128, 192, 256)
"""Those of one part and of several, padded and not."""
MASKS = ("", "-causal", "-causal-window-sink", "-causal-bias-keymask", "-mask-alibi", "-causal-softcap-offset")
DIRECTIONS = ("fwd", "bwd")


def rendered(direction: str, head_dims: Sequence[int], folder: Path) -> int:
    """Write the kernels of every head dimension, mask and family, by their defaults and seed_configs; their number."""
    count = 0
    for head_dim in head_dims:
        for mask in MASKS:
            spec = Specialization.parse(f"{direction}-bf16-d{head_dim}{mask}")
            for row in families.FAMILIES:
                if row.direction != spec.direction or families.unsupported(row, spec, H200) is not None:
                    continue
                # seed_configs differ by head dimension only where the padded size does
                seed_configs = row.seed_configs(spec, H200) if head_dim in (64, 72, 128, 192, 256) else ()
                for config in (row.default(spec, H200), *seed_configs):
                    (folder / f"{row.id}_{head_dim}_{count}.py").write_text(render(spec, config).text)
                    count += 1
    return count


@pytest.mark.parametrize("head_dims", first(1, map(pytest.param, [FEW, HEAD_DIMS])), ids=["few", "all"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_name_of_a_rendered_kernel_is_defined(direction: str, head_dims: Sequence[int], tmp_path: Path) -> None:
    assert rendered(direction, head_dims, tmp_path) > 2 * len(head_dims) * len(MASKS)
    assert_passes(tmp_path, "check", "--no-cache", "--select", "F821")
