"""Scores that features and functions change, in the backward kernels for Hopper, on a GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from flashgen.codegen.build import compile_kernel
from flashgen.codegen.families import invalid, unsupported
from flashgen.core.features.values import Features
from flashgen.core.score_mods import ScoreMods
from flashgen.launch.backward import FIELDS, BackwardTensors, backward_geometry
from flashgen.launch.gpu import current_device
from flashgen.launch.plan import make_backward_plan
from tests.backward_scores import BY_HEAD, DOCUMENTS, SPLIT, SQUARED, Case, Problem, problem

pytestmark = pytest.mark.gpu

LONG, ODD = (700, 900), (1000, 333)
BLOCKS = ScoreMods(mask_mod=DOCUMENTS, aux=("i32",), block_mask=True)
OWN_BLOCKS = ScoreMods(mask_mod=BY_HEAD, block_mask=True)
BENT = ScoreMods(score_mod=SQUARED, aux=("i32",))
BOTH = ScoreMods(score_mod=SQUARED, mask_mod=DOCUMENTS, aux=("i32",))

SCORES = {
    "softcap": Case(key="causal-softcap", softcap=3.0),
    "softcap of all": Case(key="softcap", softcap=2.0, sizes=ODD),
    "slopes": Case(key="causal-alibi", alibi=True, heads=(8, 2)),
    "slopes both ways": Case(key="alibi", alibi=True, sizes=ODD),
    "slopes and softcap in a window": Case(key="window-softcap-alibi", softcap=2.0, alibi=True),
    "keys": Case(key="keymask", hides_keys="batch", heads=(7, 1)),
    "keys of each head": Case(key="causal-keymask", hides_keys="heads", heads=(6, 2), sizes=ODD),
    "keys in a window": Case(key="window-keymask", hides_keys="heads"),
    "documents": Case(key="causal", mods=replace(BLOCKS, block_mask=False), sizes=(900, 900)),
    "blocks": Case(key="", mods=BLOCKS, heads=(8, 2), blocks="shared"),
    "blocks of each head": Case(key="", mods=OWN_BLOCKS, heads=(3, 1), blocks="own", sizes=ODD),
    "blocks of each head and hidden keys": Case(
        key="causal-keymask", hides_keys="heads", mods=OWN_BLOCKS, heads=(3, 1), blocks="own"
    ),
    "score_mod": Case(key="causal", mods=BENT, sizes=(777, 777)),
    "everything": Case(
        key="window-softcap-alibi-keymask", softcap=2.0, alibi=True, hides_keys="heads", mods=BOTH, heads=(4, 2)
    ),
}
HEADS = ("bf16-d64", "fp16-d96", "bf16-d128", "bf16-d192-dv128", "fp16-d256")


def plan_of(case: Case, given: Problem):  # type: ignore[no-untyped-def]
    """A launch of the case's config, or a skipped test."""
    device = current_device()
    if (reason := unsupported(case.row, given.spec, device)) is not None:
        pytest.skip(reason)
    config = case.row.default(given.spec, device).replace(**case.changes)
    if (reason := invalid(config, given.spec, device)) is not None:
        pytest.skip(reason)
    tensors = {name: x.cuda() for name, x in given.tensors.items()}
    tensors |= {f"d{name}": torch.full_like(tensors[name], math.nan) for name in "qkv"}
    whole = BackwardTensors(
        **{field: tensors[name] for name, field in FIELDS.items()}, lse=tensors["lse"], dlse=tensors["dlse"]
    )
    features = on_gpu(given.features)
    compiled = compile_kernel(given.spec, config, device)
    launch = make_backward_plan(compiled, given.spec, config, backward_geometry(whole, features), 0)
    return launch, whole, features


def on_gpu(features: Features) -> Features:
    found = {}
    for name in ("alibi_slopes", "mask"):
        value = getattr(features, name)
        found[name] = None if value is None else value.cuda()
    blocks = features.block_mask
    if blocks is not None:
        names = [
            f"{way}{kind}_{what}"
            for way in ("", "q_")
            for kind in ("partial", "full")
            for what in ("counts", "indices")
        ]
        blocks = replace(blocks, **{name: getattr(blocks, name).cuda() for name in names})
    return replace(features, **found, aux=tuple(one.cuda() for one in features.aux), block_mask=blocks)


def checked(case: Case) -> None:
    given = problem(case)
    launch, whole, features = plan_of(case, given)
    before: list[torch.Tensor] | None = None
    for _ in range(3):
        launch(whole, features=features)
        found = {"q": whole.dq.clone(), "k": whole.dk.clone(), "v": whole.dv.clone()}
        given.assert_right(found)
        # only dq of the fused family has sums of no fixed order
        same = [found[name] for name in (("q", "k", "v") if case.row.is_deterministic else ("k", "v"))]
        assert before is None or all(map(torch.equal, same, before))
        before = same


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", SCORES)
def test_gradients_are_right(name: str, heads: str, split: bool) -> None:
    case = SCORES[name]
    key = "-".join(filter(None, (heads, case.key)))
    sizes = LONG if case.sizes == (130, 200) else case.sizes
    checked(replace(case, key=key, sizes=sizes, **({"row": SPLIT} if split else {})))


@pytest.mark.parametrize(
    "changes",
    [
        {"stagger_warpgroups": False},
        {"accumulator_init": "interleaved"},
        {"persistent": False, "q_stages": 3},
        {"persistent": True},
        {"qk_prefetch": True, "accumulator_init": "interleaved", "stagger_warpgroups": False},
        {"block_m": 128},
        {"heads_per_tile": 1},
        {"heads_per_tile": 2},
        {"dq_conversion": "tiles", "block_m": 128},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "name", ["softcap", "slopes", "keys of each head", "documents", "blocks of each head", "everything"]
)
@pytest.mark.parametrize("heads", ["bf16-d64", "bf16-d128"])
def test_every_order_of_a_step_gives_them(name: str, heads: str, changes: dict[str, object]) -> None:
    case = SCORES[name]
    sizes = LONG if case.sizes == (130, 200) else case.sizes
    checked(replace(case, key=f"{heads}-{case.key}".rstrip("-"), sizes=sizes, changes=changes))
