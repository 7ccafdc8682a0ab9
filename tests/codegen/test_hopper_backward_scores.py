"""Scores that features and functions change, in the backward kernels for Hopper, on a modelled machine."""

from __future__ import annotations

import pytest

from flashgen.core.score_mods import ScoreMods
from tests.backward_scores import BY_HEAD, DOCUMENTS, FUSED, LOWERED, RAISED, SPLIT, SQUARED, Case, problem
from tests.codegen.backward_machine import launched
from tests.tiers import only

CASES: dict[str, Case] = {
    "softcap": Case(key="bf16-d64-causal-softcap", softcap=3.0, changes={"block_m": 64}),
    "softcap ahead": Case(
        key="bf16-d64-softcap", softcap=3.0, changes={"qk_prefetch": True, "accumulator_init": "interleaved"}
    ),
    "alibi": Case(key="bf16-d64-causal-alibi", alibi=True, heads=(4, 2)),
    "alibi both ways": Case(key="bf16-d128-alibi", alibi=True, sizes=(70, 130)),
    "softcap and alibi in a window": Case(key="bf16-d64-window-softcap-alibi", softcap=2.0, alibi=True),
    "keys": Case(key="bf16-d64-keymask", hides_keys="batch", heads=(4, 2)),
    "keys of each head": Case(key="bf16-d128-causal-keymask", hides_keys="heads", sizes=(200, 260)),
    "keys, strided": Case(key="bf16-d64-keymask-scattered", hides_keys="heads"),
    "split, keys, strided": Case(key="bf16-d64-keymask-scattered", row=SPLIT, hides_keys="heads"),
    "keys in a window": Case(key="bf16-d64-window-keymask", hides_keys="heads"),
    "documents": Case(key="bf16-d64-causal", mods=ScoreMods(mask_mod=DOCUMENTS, aux=("i32",)), sizes=(200, 200)),
    "documents, one head a tile": Case(
        key="bf16-d128",
        mods=ScoreMods(mask_mod=DOCUMENTS, aux=("i32",)),
        heads=(4, 2),
        changes={"heads_per_tile": 1},
    ),
    "blocks": Case(
        key="bf16-d64",
        mods=ScoreMods(mask_mod=DOCUMENTS, aux=("i32",), block_mask=True),
        sizes=(500, 400),
        heads=(4, 2),
        blocks="shared",
    ),
    "blocks of each head": Case(
        key="bf16-d128", mods=ScoreMods(mask_mod=BY_HEAD, block_mask=True), sizes=(400, 300), heads=(3, 1), blocks="own"
    ),
    "blocks of each head, hidden keys": Case(
        key="bf16-d64-causal-keymask",
        hides_keys="heads",
        mods=ScoreMods(mask_mod=BY_HEAD, block_mask=True),
        sizes=(400, 300),
        heads=(3, 1),
        changes={"stagger_warpgroups": False, "persistent": False},
        blocks="own",
    ),
    "score_mod": Case(
        key="bf16-d64-causal", mods=ScoreMods(score_mod=SQUARED, aux=("i32",)), sizes=(130, 130), heads=(2, 2)
    ),
    "everything": Case(
        key="bf16-d64-window-softcap-alibi-keymask",
        softcap=2.0,
        alibi=True,
        hides_keys="heads",
        mods=ScoreMods(score_mod=SQUARED, mask_mod=DOCUMENTS, aux=("i32",)),
        heads=(4, 2),
    ),
    "split, softcap and alibi in a window": Case(
        key="bf16-d64-window-softcap-alibi", row=SPLIT, softcap=2.0, alibi=True, changes={"block_m": 64}
    ),
    "split, keys of each head": Case(key="bf16-d128-causal-keymask", row=SPLIT, hides_keys="heads", heads=(4, 2)),
    "split, blocks": Case(
        key="bf16-d64",
        row=SPLIT,
        mods=ScoreMods(mask_mod=DOCUMENTS, aux=("i32",), block_mask=True),
        sizes=(500, 400),
        heads=(4, 2),
        blocks="shared",
    ),
    "split, everything": Case(
        key="bf16-d128-window-softcap-alibi-keymask",
        row=SPLIT,
        softcap=2.0,
        alibi=True,
        hides_keys="heads",
        mods=ScoreMods(score_mod=SQUARED, mask_mod=DOCUMENTS, aux=("i32",)),
        heads=(4, 2),
    ),
    "wide, softcap": Case(key="bf16-d256-causal-softcap", row=SPLIT, softcap=3.0, sizes=(70, 130)),
    "wide, alibi": Case(key="bf16-d192-alibi", row=SPLIT, alibi=True, sizes=(70, 130), heads=(4, 2)),
    "wide, keys of each head": Case(key="bf16-d192-causal-keymask", row=SPLIT, hides_keys="heads", sizes=(70, 130)),
    "wide, blocks of each head, hidden keys": Case(
        key="bf16-d256-keymask",
        row=SPLIT,
        hides_keys="heads",
        mods=ScoreMods(mask_mod=BY_HEAD, block_mask=True),
        sizes=(200, 300),
        heads=(3, 1),
        blocks="own",
    ),
    "wide, score_mod": Case(
        key="bf16-d192-causal", row=SPLIT, mods=ScoreMods(score_mod=SQUARED, aux=("i32",)), sizes=(130, 130)
    ),
}

ENDS: dict[str, Case] = {
    f"{row.id}, {words} to ({queries}, {keys})": Case(
        key="bf16-d128",
        row=row,
        mods=ScoreMods(score_mod=mod, mask_mod=DOCUMENTS, aux=("i32",), block_mask=True),
        raised=shift,
        sizes=(queries, keys),
        heads=(2, 2),
        blocks="shared",
        changes={"block_m": 64},
    )
    for row in (FUSED, SPLIT)
    for words, mod, shift in (("up", RAISED, 200), ("down", LOWERED, -200))
    for queries, keys in ((130, 128), (128, 130), (190, 193))
}
"""The last block of 128 queries or keys of a list ends in its first half, behind which there is no step."""


BY_DEFAULT = (
    "softcap ahead",
    "softcap and alibi in a window",
    "split, keys, strided",
    "blocks of each head, hidden keys",
    "everything",
    "split, everything",
    "hopper_backward_fused, up to (190, 193)",
)
"""Every feature in either family, and lists."""


@pytest.mark.parametrize("name", only(CASES | ENDS, *BY_DEFAULT))
def test_gradients_are_right(name: str) -> None:
    case = (CASES | ENDS)[name]
    given = problem(case)
    given.assert_right(launched(case.row, given.spec, case.changes, given.tensors, given.features))
