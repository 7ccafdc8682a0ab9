"""Random calls of packed sequences, of pages and of decoding, right and wrong: answered alike in all ways to call them.

As tests/fuzz/test_calls.py does with `attention`.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashgen
from flashgen.launch.decode_numbers import DecodeShape
from flashgen.launch.decode_plan import Launch
from flashgen.runtime.decode import runs
from flashgen.runtime.decode.call import CheckedDecode
from flashgen.runtime.lookup.decode_ladder import served_step
from flashgen.runtime.ops import serve
from flashgen.runtime.ops.outputs import empty_lse, empty_output
from tests.fakes.gpu import MARK, FakeGpu
from tests.fuzz.answers import DTYPES, SEED, Chooser, cases, check_answers, form
from tests.fuzz.calls import score, visible
from tests.runtime import conftest as runtime

fresh_process, gpu, ladder = runtime.fresh_process, runtime.gpu, runtime.ladder

INT32, FP32 = torch.int32, torch.float32


def scores(chooser: Chooser, batch: int, nheads: int) -> dict[str, Callable[[], Any]]:
    """Features of scores that packed sequences and decoding share."""
    of, often = chooser.of, chooser.often
    return {
        "window": lambda: often(of((8, 0), (None, 4), (16, None)), (-1, 0), (2**70, 1), (1,), "ab"),
        "softmax_scale": lambda: often(0.5, 0, -1.0, float("nan"), 1),
        "softcap": lambda: often(2.0, -1.0, float("inf"), 3),
        "alibi_slopes": lambda: chooser.tensor(*of((nheads,), (batch, nheads)), dtype=FP32),
        "sinks": lambda: chooser.tensor(nheads, dtype=often(FP32, torch.bfloat16)),
        "return_lse": lambda: True,
    }


def some(chooser: Chooser, features: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Each with a chance of its own."""
    return {name: make() for name, make in features.items() if chooser.random.random() < 0.15}


def heads(chooser: Chooser) -> tuple[int, int, int, int, torch.dtype]:
    """nheads, nheads_k, head_dim, head_dim_v and a dtype."""
    of, often = chooser.of, chooser.often
    nheads, head_dim = often(of(4, 8), 1, 0, 3), often(of(64, 128), 72, 0, 5)
    return nheads, often(of(1, nheads), 0, 2, 3), head_dim, often(head_dim, 64, 0, 5), often(of(*DTYPES[:2]), *DTYPES)


def packed(chooser: Chooser, *, paged: bool) -> dict[str, Any]:
    """The arguments of a call of `attention_varlen`, over pages or not; most of them fit together."""
    of, often = chooser.of, chooser.often
    batch, total_q = often(of(1, 3), 2, 0), often(of(64, 40), 7, 0, 1)
    nheads, nheads_k, head_dim, head_dim_v, dtype = heads(chooser)
    bound = often(64, 0, 2, -1, 2**31, 1.5)
    found: dict[str, Any] = {
        "q": chooser.tensor(total_q, nheads, head_dim, dtype=dtype),
        "cu_seqlens_q": chooser.tensor(batch + 1, dtype=INT32),
        "max_seqlen_q": bound,
        "causal": of(False, True),
    }
    features = scores(chooser, batch, nheads) | {
        "deterministic": lambda: True,
        "mask_mod": lambda: visible,
        "seqused_q": lambda: chooser.tensor(batch, dtype=INT32),
    }
    if paged:
        places: tuple[int, ...] = (often(of(6, 40), 0, 1), often(of(16, 64, 1), 10, 0))
        found["block_table"] = chooser.tensor(batch, often(of(2, 40), 0, 1), dtype=INT32)
        which = of(("seqused_k", batch), ("cu_seqlens_k", batch + 1))
        found[which[0]] = chooser.tensor(which[1], dtype=INT32)
        features["num_decodes"] = lambda: often(of(0, 1, batch), 3, 99, -1, 1.5)
        features["max_seqlen_k"] = lambda: often(of(64, 600), -1)
        found |= {name: features.pop(name)() for name in ("num_decodes",) if chooser.random.random() < 0.5}
    else:
        own = of(False, True)
        places = (often(of(64, 48), 0) if own else total_q,)
        if own:
            found |= {"cu_seqlens_k": chooser.tensor(batch + 1, dtype=INT32), "max_seqlen_k": often(64, None, -1)}
        features["seqused_k"] = lambda: chooser.tensor(batch, dtype=INT32)
    found["k"] = chooser.tensor(*places, nheads_k, head_dim, dtype=dtype)
    found["v"] = chooser.tensor(*places, nheads_k, head_dim_v, dtype=dtype)
    found |= some(chooser, features)
    if "mask_mod" in found:
        found |= {"aux": often((torch.zeros(3),), (), (torch.zeros(3), 1)), "score_mod": of(None, score)}
    return found


def step(chooser: Chooser) -> dict[str, Any]:
    """The arguments of a call of `attention_decode`; most of them fit together."""
    of, often = chooser.of, chooser.often
    batch, seqlen_q = often(of(1, 3), 2, 0), often(of(1, 4), 0, 16, 17)
    nheads, nheads_k, head_dim, head_dim_v, dtype = heads(chooser)
    paged = of(False, True)
    places = (often(of(6, 40), 0), often(of(16, 64), 0, 10)) if paged else (often(batch, 2), often(of(64, 600), 0))
    found: dict[str, Any] = {
        "q": chooser.tensor(batch, seqlen_q, nheads, head_dim, dtype=dtype),
        "k_cache": chooser.tensor(*places, nheads_k, head_dim, dtype=dtype),
        "v_cache": chooser.tensor(*places, nheads_k, head_dim_v, dtype=dtype),
        "seqlens": chooser.tensor(batch, dtype=INT32),
        "causal": of(False, True),
    }
    if paged:
        found["block_table"] = chooser.tensor(batch, often(of(2, 40), 0), dtype=INT32)
    features = scores(chooser, batch, nheads) | {"fixed_split_size": lambda: often(of(256, 1024), 100, 0, 2.5)}
    if not paged or chooser.random.random() < 0.1:
        features["leftpad"] = lambda: chooser.tensor(batch, dtype=INT32)
        features["batch_idx"] = lambda: chooser.tensor(batch, dtype=INT32)
    return found | some(chooser, features)


def promised_rows(given: dict[str, Any]) -> object:
    """The form of output and LSE of packed sequences: as of one batch element."""
    paged = "block_table" in given
    q, v = given["q"][None], given["v"] if paged else given["v"][None]
    expected = (empty_output(q, v, bshd=True)[0], empty_lse(q, bshd=True)[0])
    return form(expected if given.get("return_lse") else expected[:1])


def promised_step(given: dict[str, Any]) -> object:
    """The same of a step of decoding."""
    expected = empty_output(given["q"], given["v_cache"], bshd=True), empty_lse(given["q"], bshd=True)
    return form(expected if given.get("return_lse") else expected[:1])


def marking(checked: CheckedDecode, config: object, index: int | None, names: tuple[str, ...]) -> Any:
    """In the place of `plans.opened`: launches that mark what they are to write, where a family computes the call."""
    served_step(checked.spec, checked.shape.sizes, serve.device_at(0), serve.records())

    def run(shape: DecodeShape, pointers: tuple[int, ...], out: torch.Tensor, keeps: bool) -> None:
        out.fill_(MARK)
        if "LSE" in names:
            count = shape.batch * shape.nheads * shape.seqlen_q
            (ctypes.c_float * count).from_address(pointers[names.index("LSE")])[:] = [MARK] * count

    return lambda shape: Launch(run, shape)


@pytest.fixture(autouse=True)
def on_this_machine(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU count as those of its GPU, past torch's dispatcher, too."""
    monkeypatch.setattr(serve, "gpu_index", lambda tensor: 0)
    monkeypatch.setattr(runs, "opened", marking)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    guards = torch._C._dynamo.guards  # type: ignore[attr-defined]
    monkeypatch.setattr(guards, "_empty_strided_cuda", guards._empty_strided_cpu)


KINDS: dict[str, Callable[[Chooser], dict[str, Any]]] = {
    "rows": lambda chooser: packed(chooser, paged=False),
    "pages": lambda chooser: packed(chooser, paged=True),
    "step": step,
}


@pytest.mark.parametrize("number", cases(150))
def test_a_call_is_answered_alike_everywhere(number: int) -> None:
    kind = list(KINDS)[number % len(KINDS)]
    where, chosen = f"seed {SEED}, case {number}, {kind}", random.Random(f"{SEED} {kind} {number}")
    given = KINDS[kind](Chooser(chosen))
    call, promised = flashgen.attention_varlen, promised_rows
    keys = given.get("k", given.get("k_cache"))
    if kind == "step":
        call, promised = flashgen.attention_decode, promised_step
    has_keys = bool(keys.numel()) and bool(given.get("block_table", keys).numel())
    check_answers(call, given, chosen, where, promised, has_keys=has_keys)
