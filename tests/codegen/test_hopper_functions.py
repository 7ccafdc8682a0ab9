"""Functions of the caller in the Hopper forward family: whole kernels on a modelled machine, and refusals."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl

from flashgen.codegen.build import compile_kernel
from flashgen.codegen.families import default_config, invalid, unsupported
from flashgen.codegen.hopper_forward.family import HOPPER_FORWARD
from flashgen.codegen.render import render
from flashgen.core.config import KnobValue
from flashgen.core.device import find_device
from flashgen.core.features.values import BlockMask
from flashgen.core.score_mods import MASK_BLOCK, ScoreMods
from flashgen.core.workload import Specialization
from flashgen.launch.parameters import block_of, is_descriptor
from flashgen.runtime.block_mask import _listed
from flashgen.runtime.ops.mods import score_mods
from scripts.role_captures import overwritten
from scripts.role_order import hasty
from tests.codegen.gluon_machine import Descriptor, Machine, Pointer, kernel_of, key_places
from tests.codegen.goldens import DOCUMENT, SLOPED
from tests.codegen.ruff import FORMAT, assert_passes
from tests.tiers import EXHAUSTIVE, first, only

H200 = find_device("h200")
LOG2E = math.log2(math.e)
PLAIN: dict[str, KnobValue] = {
    "warpgroups": 2,
    "block_n": 128,
    "v_stages": 2,
    "barriers": "mbarrier",
    "exp_order": "free",
    "ping_pong": True,
    "conditional_rescale": False,
}
SMALL: dict[str, KnobValue] = {**PLAIN, "warpgroups": 1, "blocks_per_sm": 2, "block_n": 64, "ping_pong": False}
NAMED: dict[str, KnobValue] = {**PLAIN, "block_n": 64, "v_stages": 3, "barriers": "named"}


def document(b, h, q_idx, k_idx, doc):
    return tl.load(doc + q_idx) == tl.load(doc + k_idx)


def causal_document(b, h, q_idx, k_idx, doc):
    return (tl.load(doc + q_idx) == tl.load(doc + k_idx)) & (k_idx <= q_idx)


def by_head(b, h, q_idx, k_idx):
    return (k_idx % (h + 2) != 0) & (k_idx >= 3 * b)


def early(b, h, q_idx, k_idx):
    return k_idx < 130


def late_rows(b, h, q_idx, k_idx):
    return (q_idx >= 70) & (k_idx >= 140)


def nothing(b, h, q_idx, k_idx):
    return k_idx < q_idx - 100000


def relative(score, b, h, q_idx, k_idx, table):
    return score + tl.load(table + h * 1024 + k_idx - q_idx + 512)


def by_table(b, h, q_idx, k_idx, table):
    return (tl.load(table + k_idx) > -0.5) & (k_idx % 200 < 100 + 30 * h)


def nothing_of_table(b, h, q_idx, k_idx, table):
    return tl.load(table + k_idx) > 1000.0


def halves(score, b, h, q_idx, k_idx):
    return tl.where(score > 0.1, score * 0.5, float("-inf"))


def of_keys(score, b, h, q_idx, k_idx):
    return k_idx % 3


Formula = Callable[..., torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A dense call: sizes, functions, what else hides keys, and which hidden keys hold NaN."""

    sizes: tuple[int, int, int, int, int] = (1, 2, 1, 203, 300)  # batch, nheads, nheads_k, seqlen_q, seqlen_k
    head_dim: int = 64
    mask: Callable[..., Any] | None = None
    score: Callable[..., Any] | None = None
    aux: str = ""
    features: str = ""
    window: tuple[int, int] = (1 << 20, 1 << 20)
    q_offset: int | None = None
    poison: bool = False
    rising: float = 0.0
    per_head: bool = False


TWO = (2, 2, 1, 203, 300)
"""Of cases whose functions or lists are other ones for each batch element."""

CASES: dict[str, Case] = {
    "documents": Case(mask=document, aux="doc", poison=True),
    "causal documents": Case(mask=causal_document, aux="doc", sizes=(1, 2, 2, 300, 300)),
    "heads": Case(mask=by_head, per_head=True, sizes=TWO),
    "early keys": Case(mask=early, poison=True, sizes=(1, 2, 1, 129, 400)),
    "late keys": Case(mask=late_rows, poison=True),
    "nothing": Case(mask=nothing, poison=True),
    "one": Case(mask=by_head, sizes=(1, 1, 1, 1, 1)),
    "causal too": Case(mask=document, aux="doc", features="-causal", q_offset=60, poison=True),
    "a window too": Case(mask=by_head, features="-window", window=(70, 20), poison=True, sizes=TWO),
    "rising scores": Case(mask=document, aux="doc", rising=200.0),
    "heads in parts": Case(mask=early, head_dim=96, poison=True, sizes=(1, 2, 1, 70, 300)),
}
SCORES: dict[str, Case] = {
    "relative": Case(score=relative, aux="table"),
    "relative, causal": Case(score=relative, aux="table", features="-causal", sizes=(1, 4, 2, 300, 200)),
    "hides": Case(score=halves, rising=40.0),
    "keys alone": Case(score=of_keys),
    "all": Case(score=halves, mask=by_head, features="-softcap", sizes=TWO),
}


def made(case: Case, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    batch, nheads, nheads_k, seqlen_q, seqlen_k = case.sizes
    shapes = {"q": (nheads, seqlen_q), "k": (nheads_k, seqlen_k), "v": (nheads_k, seqlen_k)}
    found = {
        name: torch.randn(batch, *shape, case.head_dim, generator=generator).bfloat16()
        for name, shape in shapes.items()
    }
    found["doc"] = torch.sort(torch.randint(0, 5, (max(seqlen_q, seqlen_k),), generator=generator))[0]
    found["table"] = torch.randn(nheads * 1024, generator=generator)
    if case.rising:
        found["q"][..., 0], found["k"][..., 0] = 8.0, torch.linspace(case.rising, 0.0, seqlen_k).bfloat16()
    return found


def _called(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """A function of the caller, with what torch has in the place of Triton's language."""
    space = {
        "tl": type("tl", (), {"load": staticmethod(lambda p: p.memory[p.place]), "where": staticmethod(torch.where)})
    }
    return type(function)(function.__code__, space)(*arguments)


def seen_and_scores(case: Case, data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What mask_mod shows, what else is visible, and scores in float64, all (batch, nheads, seqlen_q, seqlen_k)."""
    _, nheads, nheads_k, seqlen_q, seqlen_k = case.sizes
    q, k = data["q"].double(), data["k"].double().repeat_interleave(nheads // nheads_k, 1)
    s = q @ k.mT * case.head_dim**-0.5
    places = [torch.arange(n).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate(s.shape)]
    aux = [Pointer(memory=data[case.aux])] if case.aux else []
    offset = seqlen_k - seqlen_q if case.q_offset is None else case.q_offset
    ahead = places[3] - places[2] - offset
    if "softcap" in case.features:
        s = 5.0 * torch.tanh(s / 5.0)
    if case.score is not None:
        s = torch.as_tensor(_called(case.score, [s, *places, *aux])).double().broadcast_to(s.shape)
    shown = torch.ones_like(s, dtype=torch.bool)
    if case.mask is not None:
        shown = shown & _called(case.mask, [*places, *aux])
    inside = (ahead >= -case.window[0]) & (ahead <= (0 if "causal" in case.features else case.window[1]))
    return shown, inside.broadcast_to(s.shape), s


def block_mask_of(case: Case, shown: torch.Tensor, mods: ScoreMods) -> BlockMask:
    rows, keys = (-(-size // MASK_BLOCK) * MASK_BLOCK for size in shown.shape[2:])
    shown = shown if case.per_head else shown[:1, :1]
    whole = torch.zeros(*shown.shape[:2], rows, keys, dtype=torch.int32)
    whole[..., : shown.shape[2], : shown.shape[3]] = shown
    blocks = whole.unflatten(3, (-1, MASK_BLOCK)).unflatten(2, (-1, MASK_BLOCK))
    return _listed(blocks.sum((3, 5)), *map(int, shown.shape[2:]), mods)


def launched(
    case: Case,
    data: dict[str, torch.Tensor],
    changes: dict[str, KnobValue],
    blocks: BlockMask | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE, as so many CTAs compute them."""
    mods = score_mods(case.score, case.mask, (data[case.aux].dtype,) if case.aux else ())
    mods = replace(mods, block_mask=blocks is not None)
    spec = replace(Specialization.parse(f"fwd-bf16-d{case.head_dim}{case.features}"), mods=mods)
    assert unsupported(HOPPER_FORWARD, spec, H200) is None
    config = HOPPER_FORWARD.default(spec, H200).replace(**changes)
    batch, nheads, nheads_k, seqlen_q, seqlen_k = case.sizes
    out = torch.full_like(data["q"], math.nan)
    lse = torch.full((batch, nheads, seqlen_q), math.nan)
    counter = torch.zeros(1, dtype=torch.int64)
    scale, cap = case.head_dim**-0.5, 5.0
    values: dict[str, Any] = {
        "softmax_scale_log2": scale * LOG2E,
        "softcap_rate": 2 * LOG2E * scale / cap,
        "softcap_scale_log2": 2 * LOG2E * cap,
        "q_offset": torch.tensor(seqlen_k - seqlen_q if case.q_offset is None else case.q_offset),
        "window_left": case.window[0],
        "window_right": case.window[1],
        "batch": batch,
        "nheads": nheads,
        "group_size": nheads // nheads_k,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "lse_rows": seqlen_q,
        "LSE": Pointer(memory=lse.view(-1)),
        "Counter": Pointer(memory=counter),
        "O": Pointer(memory=out.view(-1)),
        **dict(zip(("stride_ob", "stride_oh", "stride_os"), out.stride()[:3], strict=True)),
        "Aux0": Pointer(memory=data.get(case.aux, counter)),
    }
    if blocks is not None:
        lists = {name: getattr(blocks, f"{name.lower()}") for name in ("Partial_Counts", "Partial_Indices")}
        lists |= {name: getattr(blocks, f"{name.lower()}") for name in ("Full_Counts", "Full_Indices")}
        values |= {name.replace("_", ""): Pointer(memory=x.long().view(-1)) for name, x in lists.items()}
        heads, strides = blocks.full_counts.shape[:2], blocks.full_counts.stride()[:2]
        steps = [stride if size > 1 else 0 for size, stride in zip(heads, strides, strict=True)]
        values |= {"stride_block_b": steps[0], "stride_block_h": steps[1]}
        values["num_k_blocks"] = blocks.full_indices.shape[3]
    tensors = {"q": data["q"], "k": data["k"], "v": data["v"], "o": out}
    arguments = []
    for parameter in HOPPER_FORWARD.parameters(spec, config):
        if is_descriptor(parameter):
            one = tensors[parameter.name[0]]
            shape, strides = tuple(one.shape), tuple(one.stride())
            arguments.append(Descriptor(memory=one.view(-1), shape=shape, strides=strides, block=block_of(parameter)))
        else:
            arguments.append(values[parameter.name])
    machine = Machine(programs=2)
    places = functools.partial(key_places, block_n=config.integer("block_n"))
    machine.run(kernel_of(render(spec, config).text, HOPPER_FORWARD.id, machine, _k_idx=places), arguments)
    assert int(counter) == 0
    return out, lse


def assert_right(case: Case, changes: dict[str, KnobValue], *, listed: bool = False) -> None:
    data = made(case)
    shown, inside, s = seen_and_scores(case, data)
    seen = shown & inside
    s = s.masked_fill(~seen, -math.inf)
    values = data["v"].double().repeat_interleave(case.sizes[1] // case.sizes[2], 1)
    out, lse = torch.softmax(s, -1).nan_to_num(0.0) @ values, torch.logsumexp(s, -1)
    if case.poison:
        hidden = ~seen.unflatten(1, (case.sizes[2], -1)).any(2).any(2)
        assert bool(hidden.any())
        data["k"][hidden], data["v"][hidden] = math.nan, math.nan
    mods = score_mods(None, case.mask, (data[case.aux].dtype,) if case.aux else ()) if listed else None
    blocks = block_mask_of(case, shown, mods) if mods else None
    found = launched(case, data, changes, blocks)
    torch.testing.assert_close(found[0].double(), out, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(found[1].double(), lse, atol=5e-3, rtol=1e-3)


def kinds(case: Case) -> Iterator[dict[str, KnobValue]]:
    """Configs that are valid for a case, with the way in which they hide what lies behind the diagonal."""
    hides: dict[str, KnobValue] = {"heads_per_group": 1, "masked_blocks": "one"}
    if "causal" in case.features or "window" in case.features:
        hides = {"heads_per_group": 2 if "causal" in case.features else 1, "masked_blocks": "branch"}
    for changes in (PLAIN, SMALL, NAMED):
        yield {**changes, **hides}


@pytest.mark.parametrize("name", only(CASES, "causal documents", "a window too", "heads in parts"))
def test_masks_are_right(name: str) -> None:
    for changes in kinds(CASES[name]):
        assert_right(CASES[name], changes)


@pytest.mark.parametrize("name", only(SCORES, "relative, causal", "all"))
def test_scores_are_right(name: str) -> None:
    for changes in kinds(SCORES[name]):
        assert_right(SCORES[name], changes)


@EXHAUSTIVE
@pytest.mark.parametrize("kind", first(1, ["peeled", "one"]))
def test_every_way_to_hide_behind_the_diagonal_is_right(kind: str) -> None:
    case = replace(CASES["causal too"], q_offset=61, sizes=(1, 2, 1, 200, 300))
    for changes in (PLAIN, NAMED if kind == "peeled" else PLAIN):
        assert_right(case, {**changes, "heads_per_group": 2, "masked_blocks": kind})
    skipped = {"heads_per_group": 2, "masked_blocks": "branch", "hidden_blocks": "skipped"}
    assert_right(case, {**NAMED, **skipped})


@pytest.mark.parametrize("name", only([*CASES, "both"], "causal too", "both"))
def test_blocks_of_a_block_mask_are_right(name: str) -> None:
    """Also under a causal mask or a window, which hide keys of the blocks that are listed."""
    case = {**CASES, "both": Case(score=relative, mask=by_table, aux="table", per_head=True, sizes=TWO)}[name]
    for changes in kinds(case):
        assert_right(case, changes, listed=True)


def test_a_tile_without_a_listed_block_asks_no_function() -> None:
    case = Case(score=relative, mask=nothing_of_table, aux="table", poison=True)
    assert_right(case, next(kinds(case)), listed=True)


def test_mask_mod_is_asked_in_partial_blocks_alone() -> None:
    """A list that calls a partial block full shows all of it, and its values count in the second pass, too."""
    case = Case(mask=early, sizes=(1, 2, 1, 128, 400))
    data = made(case)
    shown, _, s = seen_and_scores(case, data)
    found = block_mask_of(case, shown, score_mods(None, early))
    blocks = replace(
        found, partial_counts=found.partial_counts * 0, full_counts=found.full_counts + found.partial_counts
    )
    s = s.masked_fill(torch.arange(400) >= 256, -math.inf)
    expected = torch.softmax(s, -1) @ data["v"].double(), torch.logsumexp(s, -1)
    for changes in kinds(case):
        got = launched(case, data, changes, blocks)
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one.double(), other, atol=2e-2, rtol=2e-2)


# --- what is refused -----------------------------------------------------------------------------------------------

MODS = {
    "score": score_mods(halves, None),
    "mask": score_mods(None, early),
    "lists": replace(score_mods(None, early), block_mask=True),
}


@pytest.mark.parametrize(
    ("key", "kind", "changes", "reason"),
    [
        ("fwd-bf16-d64", "mask", {"packed_heads": 4}, "a function of the caller is asked about one head"),
        ("fwd-bf16-d64", "score", {"softmax_reference": "row_sums"}, "a row may see its first key in any block"),
        ("fwd-bf16-d64", "mask", {"split_keys": True}, "a CTA has all keys of a tile"),
        (
            "fwd-bf16-d64",
            "lists",
            {"warpgroups": 3, "block_n": 64, "blocks_per_sm": 1},
            "192 query rows do not divide the 128",
        ),
        ("fwd-bf16-d64-causal", "lists", {"masked_blocks": "one"}, "blocks of a block mask come in no order"),
        (
            "fwd-bf16-d64",
            "score",
            {"warpgroups": 3, "blocks_per_sm": 1},
            "a consumer thread needs about 172 registers and gets 160",
        ),
    ],
)
def test_configs_that_cannot_work_say_why(key: str, kind: str, changes: dict[str, KnobValue], reason: str) -> None:
    spec = replace(Specialization.parse(key), mods=MODS[kind])
    config = default_config(spec, H200)
    assert config.family == HOPPER_FORWARD.id
    assert invalid(config, spec, H200) is None
    assert reason in str(invalid(config.replace(**changes), spec, H200))


def test_a_mask_of_keys_beside_a_mask_mod_is_left_to_the_portable_family() -> None:
    spec = Specialization.parse("fwd-bf16-d64-keymask")
    assert "would clear the same rows of V" in str(unsupported(HOPPER_FORWARD, replace(spec, mods=MODS["mask"]), H200))
    assert unsupported(HOPPER_FORWARD, replace(spec, mods=MODS["score"]), H200) is None


# --- the text, and what becomes of it ------------------------------------------------------------------------------

KEYS = (
    "fwd-bf16-d64",
    "fwd-fp16-d96-causal-bias-sink",
    "fwd-bf16-d128-mask-window",
    "fwd-bf16-d256-causal-softcap-alibi-window",
    "fwd-bf16-d64-keybias-offset-causal",
)
AUX = ("i32", "fp32")
GIVEN = {
    "score": ScoreMods(score_mod=SLOPED, aux=AUX),
    "mask": ScoreMods(mask_mod=DOCUMENT, aux=AUX),
    "both": ScoreMods(score_mod=SLOPED, mask_mod=DOCUMENT, aux=AUX),
    "lists": ScoreMods(score_mod=SLOPED, mask_mod=DOCUMENT, aux=AUX, block_mask=True),
}


def test_every_variant_is_formatted(tmp_path: Path) -> None:
    for key, (name, mods) in itertools.product(KEYS, GIVEN.items()):
        spec = replace(Specialization.parse(key), mods=mods)
        source = render(spec, HOPPER_FORWARD.default(spec, H200))
        (tmp_path / f"{name}_{source.module}.py").write_text(source.text)
    assert_passes(tmp_path, *FORMAT)
    assert len(list(tmp_path.glob("*.py"))) == 4 * len(KEYS)


TOLERATED_SPILLS = 256
"""Bytes of a thread, in the pass that runs where hidden rows held NaN alone."""


@EXHAUSTIVE
def test_functions_and_lists_compile_for_sm90() -> None:
    spec = replace(Specialization.parse("fwd-bf16-d128"), mods=GIVEN["lists"])
    compiled = compile_kernel(spec, HOPPER_FORWARD.default(spec, H200), H200)
    assert compiled.spills <= TOLERATED_SPILLS
    assert not overwritten(compiled.main.handle.asm["ptx"])
    assert not hasty(compiled.main.handle.asm["ptx"])
