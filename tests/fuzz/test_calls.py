"""Random calls, right and wrong: past torch's dispatcher, through it and on the meta device they are answered alike.

A call gives what a kernel wrote, in the promised form, or an error of flashgen's, and gives it again when it is
repeated. `make fuzz` runs more cases of another seed; a failure names the seed and the case, which are run again with
FUZZ_SEED and FUZZ_FIRST.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import flashgen
from flashgen.core.errors import FlashgenError, WorkloadError
from flashgen.runtime.ops import serve
from flashgen.runtime.ops.outputs import empty_lse, empty_output
from tests.fakes.gpu import MARK, FakeGpu, OnGpu
from tests.fuzz.calls import score, visible
from tests.runtime.conftest import fresh_process, gpu, ladder  # noqa: F401 - fixtures

CASES = int(os.environ.get("FUZZ_CASES", "120"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
FIRST = int(os.environ.get("FUZZ_FIRST", "0"))

SIZES = {"batch": (1, 2, 0), "nheads": (4, 8, 1, 0, 3), "seqlen": (64, 1, 0, 7, 128), "head_dim": (64, 128, 72, 0, 5)}
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32)
ODD = 0.06
"""How often a choice is any, in place of the first ones, which fit together."""

Tensors = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Chooser:
    """Choices of one case."""

    random: random.Random

    def often(self, usual: Any, *others: Any) -> Any:
        return self.random.choice(others) if others and self.random.random() < ODD else usual

    def of(self, *values: Any) -> Any:
        return self.random.choice(values)

    def tensor(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Of this shape, now and then with other strides, another rank or another dtype."""
        shape = self.often(shape, shape[1:], (*shape, 1), tuple(reversed(shape)), (*shape[:-1], 3), shape[:-1])
        found = torch.zeros(shape, dtype=self.often(dtype, *DTYPES))
        if not found.dim():
            return found
        apart = (lambda: torch.zeros((*shape[:-1], 2 * shape[-1]), dtype=found.dtype)[..., ::2],)
        swapped = (lambda: torch.zeros(shape, dtype=found.dtype).transpose(0, -1),)
        return self.often(lambda: found, *apart, *swapped)()


def arguments(chooser: Chooser) -> dict[str, Any]:
    """The arguments of a call; most of them fit together."""
    of, often = chooser.of, chooser.often
    batch, nheads, seqlen_q, head_dim = (often(of(*sizes[:2]), *sizes) for sizes in SIZES.values())
    nheads_k = often(of(1, nheads), 0, 2, 3)
    seqlen_k, head_dim_v = often(of(64, 48), *SIZES["seqlen"]), often(head_dim, *SIZES["head_dim"])
    bshd, dtype = of(False, True), often(of(*DTYPES[:3]), *DTYPES)

    def laid(heads: int, seqlen: int, dim: int) -> torch.Tensor:
        return chooser.tensor(batch, *((seqlen, heads) if bshd else (heads, seqlen)), dim, dtype=dtype)

    found: dict[str, Any] = {
        "q": laid(nheads, seqlen_q, head_dim),
        "k": laid(nheads_k, seqlen_k, head_dim),
        "v": laid(nheads_k, seqlen_k, head_dim_v),
        "layout": "bshd" if bshd else "bhsd",
        "causal": of(False, True),
    }
    scores = (batch, nheads, seqlen_q, seqlen_k)
    features: dict[str, Callable[[], Any]] = {
        "q_offset": lambda: of(0, 3, -2, often(1, 2**63, 2**70), chooser.tensor(batch, dtype=torch.int32)),
        "window": lambda: often(of((8, 0), (None, 4), (16, None)), (-1, 0), (2**70, 1), (1,), "ab"),
        "softmax_scale": lambda: often(0.5, 0, -1.0, float("nan"), 1),
        "softcap": lambda: often(2.0, -1.0, float("inf"), 3),
        "alibi_slopes": lambda: chooser.tensor(*of((nheads,), (batch, nheads)), dtype=torch.float32),
        "sinks": lambda: chooser.tensor(nheads, dtype=often(torch.float32, dtype)),
        "bias": lambda: chooser.tensor(*of(scores, scores[2:], scores[3:], (1, 1, 1, 1)), dtype=dtype),
        "mask": lambda: chooser.tensor(*of(scores, scores[1:], (1, seqlen_k)), dtype=torch.bool),
        "return_lse": lambda: True,
        "deterministic": lambda: True,
        "mask_mod": lambda: visible,
    }
    for name, make in features.items():
        if chooser.random.random() < 0.15:
            found[name] = make()
    if "mask_mod" in found:
        found |= {"aux": often((torch.zeros(3),), (), (torch.zeros(3), 1)), "score_mod": of(None, score)}
    return found


def moved(given: dict[str, Any], to: Tensors) -> dict[str, Any]:
    """The arguments with every tensor moved."""

    def one(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return to(value)
        return tuple(map(one, value)) if isinstance(value, tuple) else value

    return {name: one(value) for name, value in given.items()}


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def answer(given: dict[str, Any]) -> tuple[torch.Tensor, ...] | str:
    """Output and LSE, or the error in words."""
    try:
        found = flashgen.attention(**given)
    except FlashgenError as error:
        return f"{type(error).__name__}: {error}"
    return found if isinstance(found, tuple) else (found,)


def form(found: tuple[torch.Tensor, ...] | str) -> object:
    """What equal answers share: their text, or dtypes, shapes and strides.

    Strides of no element mean nothing: torch's `empty_like` keeps those of q, but not on `meta`.
    """
    if isinstance(found, str):
        return found
    return [(one.dtype, one.shape, one.stride() if one.numel() else None) for one in found]


def promised(given: dict[str, Any]) -> object:
    """The form of the output and the LSE."""
    bshd = given["layout"] == "bshd"
    expected = (empty_output(given["q"], given["v"], bshd=bshd), empty_lse(given["q"], bshd=bshd))
    return form(expected if given.get("return_lse") else expected[:1])


@pytest.fixture(autouse=True)
def on_this_machine(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Tensors of the CPU count as those of its GPU, past torch's dispatcher, too."""
    monkeypatch.setattr(serve, "gpu_index", lambda tensor: 0)


def without_devices(said: object) -> object:
    """An error without what differs between devices."""
    return said.replace(" on meta", " on cpu").replace("meta", "cpu") if isinstance(said, str) else said


ONLY_WITH_MEMORY = ("is contiguous", "elements apart", "are contiguous")
"""Rules of strides, which wait for real tensors."""


@pytest.mark.parametrize("number", range(FIRST, FIRST + CASES))
def test_a_call_is_answered_alike_everywhere(number: int) -> None:
    where, chosen = f"seed {SEED}, case {number}", random.Random(f"{SEED} {number}")
    given = arguments(Chooser(chosen))
    first, again = answer(given), answer(given)
    assert form(first) == form(again), where
    if not isinstance(first, str):
        assert form(first) == promised(given), where
        assert all(bool((one == MARK).all()) for one in (*first, *again)), f"{where}: what no kernel has written"
    dispatched = answer(moved(given, lambda tensor: tensor.as_subclass(OnGpu)))
    assert form(dispatched) == form(first), where
    with torch.no_grad():
        unwritten = answer(moved(given, on_meta))
    if not (
        isinstance(first, str) and (first.startswith("Unsupported") or any(rule in first for rule in ONLY_WITH_MEMORY))
    ):
        assert without_devices(form(unwritten)) == form(first), where
    name = chosen.choice([name for name, value in given.items() if isinstance(value, torch.Tensor)])
    for new in (lambda tensor: tensor, lambda tensor: tensor.as_subclass(OnGpu)):
        serve.reload()  # a GPU and the meta device have different indices, this CPU and the meta device have not
        mixed = answer({**moved(given, new), name: on_meta(given[name])})
        assert isinstance(mixed, str), f"{where}: {name} is on another device, and nobody has said so"
        assert isinstance(first, str) or mixed.startswith(WorkloadError.__name__), (where, mixed)
