"""The kernel that evaluates a mask_mod block by block, for building a block mask."""

from __future__ import annotations

from flashgen.codegen.render import KernelSource, render_template
from flashgen.core.score_mods import ScoreMods

TEMPLATE = "block_mask/block_mask.py.jinja"
ENTRY = "block_mask"


def render_block_mask(mods: ScoreMods, block_size: int) -> KernelSource:
    """The kernel that counts the visible scores of every block of `mods.mask_mod`.

    Raises:
        BuildError: the template did not render.
    """
    assert mods.mask_mod is not None
    text = render_template(
        TEMPLATE,
        mods.key,
        entry=ENTRY,
        block_size=block_size,
        score_mod="",
        mask_mod=mods.mask_mod.source,
        aux=[f"Aux{i}" for i in range(len(mods.aux))],
    )
    return KernelSource(entry=ENTRY, text=text)
