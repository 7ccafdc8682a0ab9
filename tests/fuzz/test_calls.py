"""Random calls of `attention`, right and wrong: in all ways to call it they are answered alike.

`make fuzz` runs more cases of another seed; a failure names the seed and the case, which are run again with FUZZ_SEED
and FUZZ_FIRST.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashgen
from flashgen.runtime.ops import serve
from flashgen.runtime.ops.outputs import empty_lse, empty_output
from tests.fakes.gpu import FakeGpu
from tests.fuzz.answers import DTYPES, SEED, Chooser, cases, check_answers, form
from tests.fuzz.calls import score, visible
from tests.runtime import conftest as runtime

fresh_process, gpu, ladder = runtime.fresh_process, runtime.gpu, runtime.ladder

SIZES = {"batch": (1, 2, 0), "nheads": (4, 8, 1, 0, 3), "seqlen": (64, 1, 0, 7, 128), "head_dim": (64, 128, 72, 0, 5)}


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


def promised(given: dict[str, Any]) -> object:
    """The form of the output and the LSE."""
    bshd = given["layout"] == "bshd"
    expected = (empty_output(given["q"], given["v"], bshd=bshd), empty_lse(given["q"], bshd=bshd))
    return form(expected if given.get("return_lse") else expected[:1])


@pytest.fixture(autouse=True)
def on_this_machine(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU count as those of its GPU, past torch's dispatcher, too."""
    monkeypatch.setattr(serve, "gpu_index", lambda tensor: 0)


@pytest.mark.parametrize("number", cases(120))
def test_a_call_is_answered_alike_everywhere(number: int) -> None:
    where, chosen = f"seed {SEED}, case {number}", random.Random(f"{SEED} {number}")
    check_answers(flashgen.attention, arguments(Chooser(chosen)), chosen, where, promised)
