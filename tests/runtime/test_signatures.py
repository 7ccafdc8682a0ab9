"""The public call is written once: what is derived from it, and what is written beside it, agrees with it."""

from __future__ import annotations

import inspect
import itertools
import pydoc
import sys
from typing import Any

import pytest
import torch

import flashgen
import flashgen.runtime.autograd.ops  # which defines those of training
import flashgen.runtime.decode.op
import flashgen.runtime.ops.append
import flashgen.runtime.varlen.mixed
from flashgen import reference
from flashgen.core.features import table
from flashgen.core.features.functions import LISTS, QUERY_LISTS
from flashgen.core.features.values import BlockMask, Features
from flashgen.runtime.arguments import FEATURE_ARGUMENTS, CallArguments, features_of
from flashgen.runtime.ops.gradients import FORMULAS
from flashgen.runtime.ops.keys import feature_key
from flashgen.runtime.ops.schemas import DIFFERENTIATED, SERVED, TRAINED, joined, split
from tests.fakes.gpu import FakeGpu, qkv

PLAIN = (
    "bool causal=False, float? softmax_scale=None, bool bshd=False, SymInt? q_offset=None, Tensor? q_offset_tensor=None"
)
FEATURES = (
    "SymInt? window_left=None, SymInt? window_right=None, float softcap=0., Tensor? alibi_slopes=None, "
    "Tensor? sinks=None, Tensor? bias=None, Tensor? mask=None"
)
FUNCTIONS = 'int mods=0, Tensor[]? aux=None, Tensor[]? block_mask=None, int[] block_sizes=[], str block_mask_mod=""'
SEQUENCES = (
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "SymInt max_seqlen_q=0, SymInt max_seqlen_k=0, bool batch_invariant=False"
)
DROPOUT = "float dropout_p=0., Tensor? rng_state=None"
FORWARD = f"{SEQUENCES}, Tensor? block_table=None, {DROPOUT}"
SCHEMAS = {
    "attention": f"(Tensor q, Tensor k, Tensor v, {PLAIN}) -> Tensor",
    "attention_lse": f"(Tensor q, Tensor k, Tensor v, {PLAIN}) -> (Tensor, Tensor)",
    "attention_features": f"(Tensor q, Tensor k, Tensor v, {PLAIN}, {FEATURES}, {FUNCTIONS}, {FORWARD}) -> Tensor",
    "attention_features_lse": (
        f"(Tensor q, Tensor k, Tensor v, {PLAIN}, {FEATURES}, {FUNCTIONS}, {FORWARD}) -> (Tensor, Tensor)"
    ),
    "attention_train": (
        f"(Tensor q, Tensor k, Tensor v, {PLAIN}, {FEATURES}, bool deterministic=False, {SEQUENCES}, {DROPOUT}, "
        f"{FUNCTIONS}) -> (Tensor, Tensor)"
    ),
    "attention_backward": (
        f"(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {PLAIN}, {FEATURES}, "
        f"bool deterministic=False, bool needs_bias_grad=False, bool needs_sink_grad=False, {SEQUENCES}, {DROPOUT}, "
        f"{FUNCTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
}
"""Graphs of torch.compile and exported programs name these."""


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_schema_of_an_op_is_what_programs_were_exported_with(name: str) -> None:
    op = getattr(torch.ops.flashgen, name).default
    assert str(op._schema) == f"flashgen::{name}{SCHEMAS[name]}"


def test_the_arguments_of_an_op_have_names_of_their_own() -> None:
    """What torch.compile normalizes a call by, when its kernels are chosen."""
    own = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("flashgen::")]
    assert {"flashgen::attention_decode", "flashgen::append_kv", "flashgen::attention_mixed"} < {s.name for s in own}
    for schema in own:
        names = [argument.name for argument in schema.arguments]
        assert len(set(names)) == len(names), schema


def test_types_and_signature_of_the_call_agree() -> None:
    parameters = inspect.signature(flashgen.attention).parameters
    keywords = {name: each for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY}
    assert list(CallArguments.__annotations__) == [name for name in keywords if name != "return_lse"]
    annotations = {name: each.__forward_arg__ for name, each in CallArguments.__annotations__.items()}
    assert annotations == {name: keywords[name].annotation for name in annotations}


def test_the_table_declares_the_arguments_of_the_call() -> None:
    keywords = inspect.signature(flashgen.attention).parameters
    declared = {each.name: each.default for feature in table.FEATURES for each in feature.arguments}
    assert {name: keywords[name].default for name in declared} == declared
    others = {"q", "k", "v", "layout", "softmax_scale", "return_lse", "others"}
    assert declared.keys() == keywords.keys() - others


def test_help_shows_every_argument() -> None:
    text = pydoc.render_doc(flashgen.attention)
    assert "sinks: 'torch.Tensor | None' = None" in text
    assert "alibi_slopes: `-slope" in text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="overloads are kept from Python 3.11 on")
def test_a_type_checker_knows_what_a_call_returns() -> None:
    from typing import get_overloads  # type: ignore[attr-defined]

    given = [inspect.signature(each) for each in get_overloads(flashgen.attention)]
    assert [(each.parameters["return_lse"].annotation, each.return_annotation) for each in given] == [
        ("Literal[False]", "torch.Tensor"),
        ("Literal[True]", "tuple[torch.Tensor, torch.Tensor]"),
        ("bool", "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"),
    ]
    assert {each.parameters["arguments"].annotation for each in given} == {"Unpack[CallArguments]"}


def test_explain_refuses_what_the_call_has_not(gpu: FakeGpu) -> None:
    with pytest.raises(TypeError, match=r"explain\(\) has no argument 'windw'"):
        flashgen.explain(*qkv(), windw=(3, None))  # type: ignore[call-arg]
    assert flashgen.explain(*qkv(), softmax_scale=0.5, window=[3, 0], causal=True).workload.window_left == 3


@pytest.mark.parametrize("call", [flashgen.attention, flashgen.explain, reference.attention])
def test_names_of_other_libraries_are_answered_with_those_of_the_call(call: Any) -> None:
    for name, words in (("attn_mask", "mask=.*bias="), ("is_causal", "q_offset=0"), ("scale", "softmax_scale=")):
        with pytest.raises(TypeError, match=f"{call.__name__}.. has no argument '{name}': .*{words}"):
            call(*qkv(), **{name: None})
    with pytest.raises(TypeError, match=r"has no argument 'colour'$"):
        call(*qkv(), colour=1)


OF_SEQUENCES = [
    getattr(module, name) for module in (flashgen, reference) for name in ("attention_varlen", "attention_decode")
]


@pytest.mark.parametrize("call", OF_SEQUENCES, ids=lambda call: f"{call.__module__}.{call.__name__}")
def test_calls_of_sequences_answer_names_of_other_libraries(call: Any) -> None:
    ends = torch.zeros(2, dtype=torch.int32)
    given = (*qkv(), ends)
    for name, words in (
        ("attn_mask", "no mask is a tensor"),
        ("is_causal", "aligned to the bottom right$"),
        ("scale", "softmax_scale="),
        ("enable_gqa", "fewer heads than q"),
        ("window_size", "None, not -1"),
        ("cache_seqlens", "it is seqlens="),
        ("page_table", "it is block_table="),
    ):
        with pytest.raises(TypeError, match=f"{call.__name__}.. has no argument '{name}': .*{words}"):
            call(*given, max_seqlen_q=1, **{name: None}) if "varlen" in call.__name__ else call(*given, **{name: None})


def test_flat_arguments_become_features_again() -> None:
    tensors = {name: torch.zeros(2) for name in ("alibi_slopes", "sinks", "bias", "mask")}
    for features in (Features(), Features(window=(3, None), softcap=2.0), Features(softcap=1.0, **tensors)):
        (found,) = SERVED.restored(*SERVED.flat(features))
        assert feature_key(found) == feature_key(features)
        assert found.softcap == features.softcap
        assert all(getattr(found, name) is getattr(features, name) for name in tensors)
        assert feature_key(joined(*split(features))) == feature_key(features)
        again, fixed = TRAINED.restored(*TRAINED.flat(features, True))
        assert (feature_key(again), fixed) == (feature_key(features), True)


def test_functions_become_features_again() -> None:
    lists = {name: torch.zeros(1, dtype=torch.int32) for name in (*LISTS, *QUERY_LISTS)}
    alone = {name: lists[name] for name in LISTS}
    masks = (
        None,
        BlockMask(**lists, seqlen_q=3, seqlen_k=5),
        BlockMask(**alone, seqlen_q=3, seqlen_k=5, mask_mod="ab"),
    )
    for mask, aux, bias in itertools.product(masks, ((), (torch.ones(2), torch.ones(3))), (None, torch.zeros(2))):
        features = Features(mods=7, aux=aux, block_mask=mask, bias=bias, softcap=2.0)
        tensors, numbers = split(features)
        assert len([tensor for tensor in tensors if tensor is not None]) == len(aux) + (bias is not None) + 4 * (
            0 if mask is None else 2 if mask.trains else 1
        )
        found = [joined(tensors, numbers), SERVED.restored(*SERVED.flat(features))[0]]
        found += [flat.restored(*flat.flat(features, True))[0] for flat in (TRAINED, DIFFERENTIATED)]
        for one in found:
            assert feature_key(one) == feature_key(features)
            assert one.aux == aux
            assert one.block_mask == mask
        _, *beside = DIFFERENTIATED.restored(*DIFFERENTIATED.flat(features))
        assert beside == [False, False, False]  # torch leaves out what equals a default
    assert SERVED.restored() == (Features(),)


def test_numbers_alone_make_one_object() -> None:
    given = {name: inspect.signature(flashgen.attention).parameters[name].default for name in FEATURE_ARGUMENTS}
    first = features_of(**{**given, "softcap": 3.0})
    assert features_of(**{**given, "softcap": 3.0}) is first
    assert features_of(**{**given, "softcap": 3.0}, is_traced=True) == first
    assert features_of(**{**given, "window": [4, 0]}).window == (4, 0)


def test_every_gradient_by_a_formula_has_one() -> None:
    assert set(FORMULAS) == {gradient.field for gradient in table.gradients() if gradient.by == "formula"}
