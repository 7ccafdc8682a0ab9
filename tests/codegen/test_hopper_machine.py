"""Kernels of packed sequences in Gluon, whole, on a modelled machine: results against float64, no deadlock."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from flashgen.codegen.family import Sizes
from flashgen.codegen.hopper_forward.family import HOPPER_FORWARD
from flashgen.codegen.render import render
from flashgen.core.config import KnobValue
from flashgen.core.device import find_device
from flashgen.launch.geometry import Geometry
from flashgen.launch.parameters import block_of, is_descriptor
from tests import paging
from tests.codegen.gluon_machine import Descriptor, Machine, Pointer, Shared, kernel_of, key_places, storage
from tests.packing import Case, Packed, assert_right, checked, make, oracle
from tests.paging import Paged
from tests.tiers import first, only

H200 = find_device("h200")
LOG2E = math.log2(math.e)
PLAIN: dict[str, KnobValue] = {
    "warpgroups": 2,
    "block_n": 128,
    "v_stages": 2,
    "q_stages": 1,
    "barriers": "mbarrier",
    "exp_order": "free",
    "ping_pong": True,
    "conditional_rescale": False,
    "softmax_reference": "running",
    "early_settle": False,
    "hidden_blocks": "computed",
}
SETTLES: dict[str, KnobValue] = {**PLAIN, "conditional_rescale": True, "softmax_reference": "row_sums", "q_stages": 2}
SMALL: dict[str, KnobValue] = {**PLAIN, "warpgroups": 1, "blocks_per_sm": 2, "block_n": 64, "ping_pong": False}
PAIR: dict[str, KnobValue] = {**SMALL, "warpgroups": 2, "qk_prefetch": "none"}
SKIPPED: dict[str, KnobValue] = {**PLAIN, "block_n": 64, "v_stages": 3, "hidden_blocks": "skipped"}


def local_causal(b, h, q_idx, k_idx):
    return (k_idx <= q_idx) & (k_idx % 5 != 4) & ((q_idx + b) % 7 != 0)


def shifted(score, b, h, q_idx, k_idx):
    return score * 0.5 + k_idx % 3 + h


LENGTHS: dict[str, Any] = {"nheads": 3, "nheads_k": 1, "head_dim": 64, "dtype": torch.bfloat16}
GROUPS_OF_FOUR: dict[str, Any] = {**LENGTHS, "nheads": 8, "nheads_k": 2}


def of_threads(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A tile times or minus one value for each row and thread."""
    return values[:, None, :, None].expand(len(x), x.shape[1] // 8, 4, 2).reshape(x.shape)


SETTLED = {
    # without what keeps row sums small: where scores grow, a sum overflows and the tile is computed again. So does one
    # that comes near, since the output overflows before it, by values above 1
    "_weights": lambda s, m_i: torch.exp2(s - of_threads(s, m_i)),
    "_rescale": lambda acc, alpha: acc * of_threads(acc, alpha),
    "_settle": lambda w, acc, m_i, l_i: (w.bfloat16(), acc, m_i, l_i.where(l_i < 2.0**100, math.inf)),
}


def launched(
    call: Packed | Paged,
    changes: dict[str, KnobValue],
    programs: int,
    products: list[int] | None = None,
    splits: int = 1,
    stores: list[tuple[int, int]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE, as so many CTAs compute them; `products` gets the rows of each product.

    `stores` gets the first head and the heads of each box that TMA stores.

    What CTAs that share keys leave, of which there are `splits` for a tile, is merged in float64.
    """
    paged = isinstance(call, Paged)
    packed = call.packed if isinstance(call, Paged) else call
    problem = paging.checked(call) if isinstance(call, Paged) else checked(call)
    spec, named = problem.spec, call.named
    config = HOPPER_FORWARD.default(spec, H200).replace(**changes)
    assert HOPPER_FORWARD.unsupported(spec, H200) is None
    q = packed.q.transpose(0, 1)[None]
    k, v = (x.transpose(1, 2) if paged else x.transpose(0, 1)[None] for x in (call.k, call.v))
    out, lse = torch.full((*packed.q.shape[:2], packed.v.shape[2]), math.nan).to(q.dtype), torch.empty(0)
    lse = torch.full((q.shape[1], q.shape[2]), math.nan)
    geometry = problem.geometry._replace(tensors=Geometry.of(q, k, v, out.transpose(0, 1)[None]).tensors)
    sizes: Sizes = geometry.sizes
    scale, cap = float(q.shape[3] ** -0.5), named.get("softcap", 0.0)
    counter = torch.zeros(1, dtype=torch.int64)
    window = named.get("window", (None, None))
    far = [1 << 20 if edge is None else edge for edge in window]
    values: dict[str, Any] = {
        "softmax_scale_log2": scale * LOG2E,
        "softcap_rate": 2 * LOG2E * scale / cap if cap else 0.0,
        "softcap_scale_log2": 2 * LOG2E * cap,
        "window_left": far[0],
        "window_right": far[1],
        "sequences": sizes.sequences,
        "total_q": sizes.seqlen_q,
        "total_k": sizes.seqlen_k,
        "nheads": sizes.nheads,
        "group_size": sizes.nheads // sizes.nheads_k,
        "lse_rows": sizes.seqlen_q,
        "LSE": Pointer(memory=lse.view(-1)),
        "Counter": Pointer(memory=counter),
        "has_seqused_q": "seqused_q" in named,
        "has_seqused_k": "seqused_k" in named,
        "table_keys": geometry.packed and geometry.packed.table_keys,
        "stride_table": geometry.packed and geometry.packed.table_stride,
        "key_splits": splits,
    }
    o_parts = torch.full((sizes.nheads, splits, sizes.seqlen_q, spec.head_dim_v), math.nan)
    lse_parts = torch.full(o_parts.shape[:3], math.nan)
    values |= {f"Aux{number}": Pointer(memory=x) for number, x in enumerate(named.get("aux", ()))}
    values |= {"OParts": Pointer(memory=o_parts.view(-1)), "LseParts": Pointer(memory=lse_parts.view(-1))}
    ends_q = named["cu_seqlens_q"]
    ends_k = named.get("cu_seqlens_k", ends_q)
    pointers = {"CuSeqlensQ": ends_q, "CuSeqlensK": ends_k, "Sinks": named.get("sinks", ends_q)}
    pointers |= {"SeqUsedQ": named.get("seqused_q", ends_q), "SeqUsedK": named.get("seqused_k", ends_k)}
    values |= {name: Pointer(memory=x if name == "Sinks" else x.long()) for name, x in pointers.items()}
    if paged:
        table = named["block_table"]
        values["Table"] = Pointer(memory=storage(table).long(), place=table.storage_offset())
    tensors = {"q": packed.q, "k": k, "v": v, "o": out}
    values |= {"O": Pointer(memory=out.view(-1))}
    values |= dict(zip(("stride_ob", "stride_oh", "stride_os"), geometry.tensors["o"][1], strict=False))
    arguments = []
    for parameter in HOPPER_FORWARD.parameters(spec, config):
        if is_descriptor(parameter):
            name, block = parameter.name[0], block_of(parameter)
            shape, strides = geometry.described(name, len(block))
            memory = storage(tensors[name])[tensors[name].storage_offset() :]
            arguments.append(Descriptor(memory=memory, shape=shape, strides=strides, block=block))
        else:
            arguments.append(values[parameter.name])
    machine = Machine(programs)
    instead: dict[str, Callable[..., Any]] = SETTLED if changes["softmax_reference"] == "row_sums" else {}
    instead = {**instead, "_k_idx": functools.partial(key_places, block_n=config.integer("block_n"))}
    if products is not None:
        multiply = machine.names()["warpgroup_mma"]
        instead = {
            **instead,
            "warpgroup_mma": lambda a, *rest, **flags: (products.append(1), multiply(a, *rest, **flags))[1],
        }
    if stores is not None:

        def copy_out(box: Descriptor, place: Sequence[Any], tile: Shared) -> None:
            stores.append((int(place[-3]), box.heads))
            box.store(place, tile)

        instead = {**instead, "copy_out": copy_out}
    machine.run(kernel_of(render(spec, config).text, HOPPER_FORWARD.id, machine, **instead), arguments)
    assert int(counter) == 0
    if splits == 1:
        return out, lse
    lse = torch.logsumexp(lse_parts.double(), 1)
    weights = torch.exp(lse_parts - lse.masked_fill(lse == -math.inf, 0.0)[:, None])
    return (weights[..., None] * o_parts).sum(1).transpose(0, 1).to(out.dtype), lse.float()


CASES: dict[str, tuple[Case, dict[str, KnobValue]]] = {
    "full": (Case(queries=(130, 0, 7, 128), spare=130, poison=(2,), **LENGTHS), PLAIN),
    "causal": (
        Case(queries=(70, 200, 1, 0), keys=(300, 5, 129, 9), options={"causal": True}, sinks=True, **LENGTHS),
        SKIPPED | {"heads_per_group": 2, "masked_blocks": "branch"},
    ),
    "used": (
        Case(
            queries=(200, 3, 90), used_q=(130, 0, 90), used_k=(64, 3, 65), spare=1, options={"causal": True}, **LENGTHS
        ),
        SMALL | {"heads_per_group": 1, "masked_blocks": "branch"},
    ),
    "window": (
        Case(queries=(260, 9), keys=(300, 40), options={"window": (100, 30), "softcap": 5.0}, poison=(1,), **LENGTHS),
        SMALL | {"masked_blocks": "branch"},
    ),
    "two programs of two warpgroups": (
        Case(queries=(70, 200, 1, 0, 65), options={"causal": True}, spare=70, poison=(2,), **LENGTHS),
        PAIR | {"masked_blocks": "branch"},
    ),
    "two programs of two warpgroups, heads in parts": (
        Case(queries=(129, 30, 0, 260), keys=(129, 70, 5, 40), **LENGTHS | {"head_dim": 80}),
        PAIR | {"split_d": True},
    ),
    "functions": (
        Case(
            queries=(70, 200, 1, 0, 20),
            keys=(300, 150, 129, 9, 0),
            spare=70,
            mod=local_causal,
            score_mod=shifted,
            options={"causal": True},
            **LENGTHS,
        ),
        PLAIN | {"heads_per_group": 2, "masked_blocks": "branch"},
    ),
    "computed again": (
        Case(queries=(140, 60, 150), poison=(1,), options={"causal": True}, **LENGTHS),
        SETTLES | {"heads_per_group": 4, "masked_blocks": "branch"},
    ),
    "heads side by side": (
        Case(
            queries=(70, 20, 1, 0, 33), keys=(300, 5, 129, 9, 70), options={"causal": True}, spare=9, **GROUPS_OF_FOUR
        ),
        PLAIN | {"packed_heads": 4, "heads_per_group": 2, "masked_blocks": "branch"},
    ),
    "a pack and a half of them": (
        Case(queries=(70, 9), used_q=(65, 9), options={"window": (40, 0)}, sinks=True, spare=40, **LENGTHS),
        SMALL | {"packed_heads": 2, "masked_blocks": "branch"},
    ),
    "fewer than a pack, in parts": (
        Case(queries=(30, 40, 5), poison=(1,), **GROUPS_OF_FOUR | {"head_dim": 80}),
        PAIR | {"packed_heads": 8, "split_d": True},
    ),
    "heads side by side, computed again": (
        Case(queries=(40, 60, 50), poison=(1,), options={"causal": True}, **GROUPS_OF_FOUR),
        SETTLES | {"packed_heads": 4, "heads_per_group": 4, "masked_blocks": "branch"},
    ),
}


@pytest.mark.parametrize(
    "name", only(CASES, "causal", "used", "window", "two programs of two warpgroups, heads in parts", "computed again")
)
def test_packed_sequences_are_right(name: str) -> None:
    case, changes = CASES[name]
    packed = make(case)
    if name.endswith("computed again"):
        packed.q.mul_(60.0)
    out, lse = launched(packed, changes, programs=3)
    assert_right(packed, out, lse)


def test_what_a_function_hides_of_packed_sequences_may_hold_nan() -> None:
    case, changes = CASES["functions"]
    packed = make(case)
    right, right_lse = oracle(packed)
    for _, _, keys in packed.sequences():
        hidden = torch.arange(keys.stop - keys.start) % 5 == 4
        packed.k[keys][hidden], packed.v[keys][hidden] = math.nan, math.nan
    out, lse = launched(packed, changes, programs=3)
    torch.testing.assert_close(out.double(), right, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double(), right_lse, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("splits", first(1, [2, 5]))
@pytest.mark.parametrize(
    "name",
    only(["full", "causal", "used", "computed again", "fewer than a pack, in parts"], "causal", "computed again"),
)
def test_ctas_that_share_the_keys_of_a_tile_are_right(name: str, splits: int) -> None:
    """Five of them are more than most tiles have blocks of keys."""
    case, changes = CASES[name]
    packed = make(case)
    if name.endswith("computed again"):
        packed.q.mul_(60.0)
    out, lse = launched(packed, changes | {"split_keys": True}, programs=3, splits=splits)
    assert_right(packed, out, lse)


@pytest.mark.parametrize("name", ["heads side by side", "a pack and a half of them", "fewer than a pack, in parts"])
def test_no_box_has_output_of_two_groups(name: str) -> None:
    """The tile of the other group would be overwritten, or not, by whoever is later."""
    case, changes = CASES[name]
    stores, group = list[tuple[int, int]](), case.nheads // case.nheads_k
    launched(make(case), changes, programs=2, stores=stores)
    assert all(head // group == (head + heads - 1) // group for head, heads in stores)
    assert bool(stores) is (changes["packed_heads"] <= group)  # type: ignore[operator]


@pytest.mark.parametrize("changes", first(1, [PLAIN, SETTLES]), ids=["running", "row_sums"])
def test_a_warpgroup_that_a_sequence_has_no_row_for_multiplies_nothing(changes: dict[str, KnobValue]) -> None:
    counts = []
    for rows in (128, 65, 64, 1):
        packed, products = make(Case(queries=(rows,), keys=(300,), **LENGTHS)), list[int]()
        assert_right(packed, *launched(packed, changes, programs=2, products=products))
        counts.append(len(products))
    assert counts[0] == counts[1] == 2 * counts[2] == 2 * counts[3] > 0


PAGED: dict[str, tuple[Case, dict[str, KnobValue], int, str]] = {
    "a block in one page": (
        Case(queries=(130, 0, 7), keys=(300, 20, 128), **LENGTHS),
        PLAIN,
        256,
        "nhd",
    ),
    "two pages of a block, causal": (
        Case(queries=(70, 200, 1, 0), keys=(300, 5, 129, 9), options={"causal": True}, sinks=True, **LENGTHS),
        SKIPPED | {"block_n": 128, "heads_per_group": 2, "masked_blocks": "branch", "hidden_blocks": "computed"},
        64,
        "hnd",
    ),
    "eight pages of a block, queries not all used": (
        Case(
            queries=(200, 3, 90), keys=(210, 3, 65), used_q=(130, 0, 90), spare=1, options={"causal": True}, **LENGTHS
        ),
        SMALL | {"heads_per_group": 1, "masked_blocks": "branch"},
        8,
        "halves",
    ),
    "a window": (
        Case(queries=(90, 9), keys=(300, 140), options={"window": (100, 30), "softcap": 5.0}, **LENGTHS),
        SMALL | {"masked_blocks": "branch"},
        16,
        "interleaved",
    ),
    "computed again": (
        Case(queries=(140, 60, 150), keys=(150, 60, 290), options={"causal": True}, **LENGTHS),
        SETTLES | {"heads_per_group": 4, "masked_blocks": "branch"},
        32,
        "nhd",
    ),
    "heads in parts": (
        Case(queries=(100, 30), keys=(190, 30), nheads=2, nheads_k=1, head_dim=96, dtype=torch.bfloat16),
        PLAIN | {"split_d": True},
        16,
        "hnd",
    ),
}


@pytest.mark.parametrize("name", ["two pages of a block, causal", "computed again", "heads in parts"])
def test_ctas_that_share_keys_over_pages_are_right(name: str) -> None:
    case, changes, page, layout = PAGED[name]
    call = paging.paged(case, page, layout, order=3)
    if name == "computed again":
        call.packed.q.mul_(60.0)
    out, lse = launched(call, changes | {"split_keys": True}, programs=3, splits=2)
    assert_right(call.packed, out, lse)


@pytest.mark.parametrize("by_ends", first(1, [False, True]), ids=["lengths", "ends"])
@pytest.mark.parametrize("name", PAGED)
def test_sequences_over_pages_are_right(name: str, by_ends: bool) -> None:
    """Pages are full of NaN where nobody may look, and entries of the table that no visible key needs are stale."""
    case, changes, page, layout = PAGED[name]
    call = paging.paged(case, page, layout, order=3, by_ends=by_ends)
    if name == "computed again":
        call.packed.q.mul_(60.0)
    out, lse = launched(call, changes, programs=3)
    assert_right(call.packed, out, lse)
