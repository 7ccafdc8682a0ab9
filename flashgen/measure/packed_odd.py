"""Packed sequences that catch kernels which are right on round lengths only.

Every case has NaN in rows that do not count and behind the end of each tensor, in both orders of memory: a row of a
neighbour that takes part, a sequence without rows that is stepped over wrongly, or a row left unwritten is a failure.
One table serves every specialization: windows and slopes count where it has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from flashgen.core.workload import Specialization, Workload
from flashgen.measure.backward_verification_case import BackwardVerificationCase
from flashgen.measure.data_kinds import HARD_KINDS, NORMAL, hard_kinds
from flashgen.measure.feature_inputs import FeatureForm
from flashgen.measure.odd_shapes import PADDING, Window
from flashgen.measure.packed_case import packed_backward_case, packed_case
from flashgen.measure.packed_inputs import PackedForm
from flashgen.measure.verification_case import VerificationCase

ODD_SEED = 20260104


@dataclass(frozen=True, slots=True, kw_only=True)
class OddPack:
    """A call with everything about it that may go wrong; `room` is added to the bounds of its lengths."""

    form: PackedForm
    nheads: int = 4
    nheads_k: int = 2
    window: Window = (None, None)
    room: int = 0

    @property
    def title(self) -> str:
        """How a failure names it."""
        form = self.form
        parts = [f"queries {_shown(form.queries)}", f"heads {self.nheads}/{self.nheads_k}", form.layout]
        parts += [] if form.keys == form.queries else [f"keys {_shown(form.keys)}"]
        parts += ["rows that are not used"] if form.used_q or form.used_k else []
        parts += [] if form.gain == 1.0 else [f"scores times {form.gain:g}"]
        parts += [] if form.data == NORMAL else [form.data]
        parts += [] if self.window == (None, None) else [f"window {self.window}"]
        return ", ".join(parts)


def _shown(lengths: tuple[int, ...]) -> str:
    return str(lengths if len(lengths) < 8 else (*lengths[:6], "..."))


def _pack(queries: tuple[int, ...], keys: tuple[int, ...] = (), **form: object) -> PackedForm:
    return PackedForm(queries=queries, keys=keys or queries, padding=PADDING, **form)  # type: ignore[arg-type]


EDGES = (0, 1, 63, 64, 65, 129, 0)

ODD_PACKS = (
    OddPack(form=_pack(EDGES), window=(30, 9)),
    OddPack(form=_pack((5, 3, 0, 130, 17), (203, 1, 19, 0, 128), layout="bhsd"), nheads=6, window=(100, None)),
    OddPack(
        form=_pack((100, 50, 64), used_q=(90, 50, 0), used_k=(33, 0, 64), spare=19),
        nheads_k=1,
        window=(0, 0),
        room=77,
    ),
    OddPack(form=_pack(tuple(n % 6 for n in range(45)), features=FeatureForm(alibi_batch=True)), nheads=2, nheads_k=2),
    OddPack(form=_pack((40, 300), (150, 333), gain=30.0, layout="bhsd"), nheads=2, nheads_k=1, window=(None, 30)),
)

HARD_PACKS = tuple(OddPack(form=_pack((70, 90), data=data), nheads=2, nheads_k=1) for data in HARD_KINDS)


def page_packs(page: int) -> tuple[OddPack, ...]:
    """Chunks of prompts over pages: keys around the end of one, and behind many of them."""
    edges = (page - 1, page, page + 1, 2 * page + 7, 1)
    return (
        OddPack(form=_pack((3, 1, 0, 70, 5), edges, used_k=edges), nheads=6, nheads_k=1, window=(page + 5, None)),
        OddPack(form=_pack((33, 64), (3 * page + 150, 5 * page), layout="bhsd"), window=(40, None), room=page),
    )


def odd_packs(spec: Specialization) -> Iterator[OddPack]:
    """The packs for a specialization, with what does not concern it left out."""
    hard = (pack for pack in HARD_PACKS if pack.form.data in hard_kinds(spec.dtype))
    for pack in (*ODD_PACKS, *(page_packs(spec.page_size) if spec.page_size else ()), *hard):
        # a causal mask is the right edge
        left, right = pack.window if spec.window else (None, None)
        features = replace(pack.form.features, sink_dtype=spec.sink_dtype)
        form = replace(pack.form, features=features)
        yield replace(pack, form=form, window=(left, None if spec.causal else right))


def odd_packed_problems(
    spec: Specialization, device: torch.device | str
) -> tuple[tuple[OddPack, VerificationCase], ...]:
    """The odd packs of a specialization with their right answers; meant to be kept for all its configs.

    Raises:
        UnsupportedError: the specialization has a feature that the references do not compute.
    """
    return tuple(
        (pack, packed_case(odd_packed_workload(spec, pack), pack.form, copies=1, seed=ODD_SEED, device=device))
        for pack in odd_packs(spec)
    )


def odd_packed_backward_problems(
    spec: Specialization, device: torch.device | str
) -> tuple[tuple[OddPack, BackwardVerificationCase], ...]:
    """The same of backward passes: every other pack has sinks, and every second pair a gradient of the LSE.

    Raises:
        UnsupportedError: the specialization has a feature that the references do not compute.
    """
    return tuple(
        (pack, odd_packed_backward_problem(spec, pack, device, number)) for number, pack in enumerate(odd_packs(spec))
    )


def odd_packed_backward_problem(
    spec: Specialization, pack: OddPack, device: torch.device | str, number: int
) -> BackwardVerificationCase:
    """The problem of the pack with this number; raises as `odd_packed_backward_problems` does."""
    workload = replace(odd_packed_workload(spec, pack), sink=number % 2 == 1)
    has_dlse = number // 2 % 2 == 1
    return packed_backward_case(workload, pack.form, copies=1, seed=ODD_SEED, device=device, with_dlse=has_dlse)


def odd_packed_workload(spec: Specialization, pack: OddPack) -> Workload:
    """The features of a specialization on an odd pack."""
    names = ("direction", "dtype", "head_dim", "head_dim_v", "causal", "softcap", "alibi", "sink", "bias", "mask")
    form = pack.form
    return Workload(
        batch=len(form.queries),
        nheads=pack.nheads,
        nheads_k=pack.nheads_k,
        seqlen_q=max(form.queries) + pack.room,
        seqlen_k=max(form.keys) + pack.room,
        total_q=sum(form.queries),
        total_k=sum(form.keys),
        varlen=True,
        window_left=pack.window[0],
        window_right=pack.window[1],
        page_size=spec.page_size,
        **{name: getattr(spec, name) for name in names},
    )
