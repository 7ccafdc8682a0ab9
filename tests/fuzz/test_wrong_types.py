"""Whatever stands in the place of an argument: the call does what it says, or says which rule the value breaks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import flashgen
from flashgen.core.errors import FlashgenError
from flashgen.launch.decode_plan import Launch
from flashgen.runtime.decode import runs, shared_keys
from flashgen.runtime.ops import append, helpers, merging, recent, serve
from tests.fakes.gpu import FakeGpu
from tests.fuzz.calls import CALLS, is_of_its_type, parameters, values
from tests.runtime import conftest as runtime
from tests.tiers import every, first

fresh_process, gpu, ladder = runtime.fresh_process, runtime.gpu, runtime.ladder

FLAGS = {
    "causal",
    "deterministic",
    "return_lse",
    "rotary_interleaved",
    "q_causal",
    "return_attn_probs",
    "return_softmax_lse",
}
"""Of the calls, which may take them by their truth: they have no time to ask what they are."""

DOORS = tuple(name for name in CALLS if name.startswith("flash_attn."))

TIMED = ("attention", "attention_decode", "attention_varlen", "append_kv", *DOORS)
"""Calls whose time on the host counts in single microseconds."""

FALSE_IS_ABSENT = {"softcap", "aux", "dropout_p"}
"""Arguments of the call that ask for nothing where they are false, whatever they are."""

CASES = [(name, parameter) for name in CALLS for parameter in parameters(name)]


def is_taken(name: str, parameter: str, value: Any) -> bool:
    """Whether a call may succeed with a value that its annotation does not name."""
    if name not in TIMED or parameter not in FLAGS | FALSE_IS_ABSENT:
        return False
    return parameter in FLAGS or not value


def refusal(name: str, arguments: dict[str, Any]) -> str | None:
    """What a call says against its arguments, or None where it takes them."""
    call, _ = CALLS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, of kinds of tensors that may change
        try:
            call(**arguments)
        except FlashgenError as error:
            return str(error)
    return None


@pytest.fixture(autouse=True)
def on_this_machine(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU count as those of its GPU, past torch's dispatcher, too; what is launched does nothing."""
    monkeypatch.setattr(serve, "gpu_index", lambda tensor: 0)
    monkeypatch.setattr(helpers, "warm", lambda helper, index: None)
    for module in (append, merging):
        monkeypatch.setattr(module, "launcher", lambda *_: lambda *_: lambda *_: None)
    monkeypatch.setattr(runs, "opened", lambda *_: lambda shape: Launch(lambda *_: None, None))
    monkeypatch.setattr(shared_keys, "planned", lambda *_: Launch(lambda *_: None, None))
    monkeypatch.setattr(recent, "_QUESTION", None)  # it would ask for memory of a GPU
    monkeypatch.setattr(runs, "MEMO_LIMIT", 0)  # a value that equals the one before would not be looked at
    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        monkeypatch.setattr(torch._C, name, lambda *_: -1, raising=False)


@pytest.mark.parametrize("name", CALLS)
def test_the_calls_that_are_changed_are_right(name: str) -> None:
    _, bases = CALLS[name]
    for make in bases.values():
        if name not in ("block_mask", "load_file"):  # which need a GPU, and a file
            assert refusal(name, make()) is None


@pytest.mark.parametrize("most", first(1, [1, 99]), ids=["one base", "all bases"])
@pytest.mark.parametrize(("name", "parameter"), every(2, CASES), ids=lambda part: part)
def test_a_value_in_the_wrong_place_is_refused_with_its_rule(name: str, parameter: str, most: int) -> None:
    _, bases = CALLS[name]
    declared = parameters(name)[parameter]
    relevant = [(base, make) for base, make in bases.items() if parameter in make()] or list(bases.items())[:1]
    tried = list(values().items())
    if most == 1:  # every other kind, and those between them of the next parameter
        tried = tried[CASES.index((name, parameter)) % 2 :: 2]
    for base, make in relevant[:most]:
        for kind, value in tried:
            said = refusal(name, {**make(), parameter: value})
            if said is None:
                fits = is_of_its_type(value, declared) or is_taken(name, parameter, value)
                assert fits, f"{parameter} of {name} ({base}) is {declared.annotation} and takes {kind}"
            else:
                assert len(said) < 3000, (kind, said)
                assert said.replace("\n", "").isprintable(), (kind, said)


def test_what_is_public_is_asked() -> None:
    asked = {name.partition(".")[0] for name in CALLS}
    errors = {name for name in flashgen.__all__ if name.endswith("Error")}
    unasked = {*flashgen.__all__} - errors - asked
    # reload takes nothing, record looks at its path when it is entered, the parts of tune are asked on their own, and
    # integrate runs the caller's model
    assert unasked == {"__version__", "reload", "record", "tune", "integrate"}
