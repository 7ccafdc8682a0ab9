"""User score functions without a GPU: what is accepted, what becomes of it, handles, and block masks of other calls."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensorMode

import flashgen
from flashgen.codegen.block_mask import render_block_mask
from flashgen.codegen.families import default_config, invalid
from flashgen.core.device import find_device
from flashgen.core.errors import DeviceError, WorkloadError
from flashgen.core.features.functions import check_aux, check_block_mask
from flashgen.core.features.values import BlockMask
from flashgen.core.record import Trial, TuningRecord
from flashgen.core.score_mods import MASK_BLOCK, ScoreMods
from flashgen.core.workload import Specialization, Workload
from flashgen.runtime.block_mask import block_mask
from flashgen.runtime.ops import mods, serve
from flashgen.runtime.ops.calls import Call
from flashgen.runtime.ops.mods import score_mods, user_function
from tests.runtime.ladders import Ladder, measured

WIDTH = 3


def causal(b, h, q_idx, k_idx):
    return q_idx >= k_idx


@triton.jit
def document(b, h, q_idx, k_idx, doc):
    """Keys of the same document."""
    # a comment is no part of what is computed
    mine = tl.load(doc + q_idx)
    return mine == tl.load(doc + k_idx)


def alibi(score, b, h: tl.tensor, q_idx, k_idx) -> tl.tensor:
    return score - tl.abs(q_idx - k_idx) * tl.exp2(-(h + 1.0))


def two_tables(score, b, h, q_idx, k_idx, table, other):
    return score + tl.load(table + q_idx - k_idx + 7) + max(0, 1)


def shifted(score, b, h, q_idx, k_idx, doc):
    return score + tl.load(doc + k_idx)


def capped(score, b, h, q_idx, k_idx):
    return tl.where(score > 3.0, float("-inf"), score)


def uses_global(b, h, q_idx, k_idx):
    return q_idx - k_idx < WIDTH


def uses_torch(b, h, q_idx, k_idx):
    return torch.abs(q_idx - k_idx) < 3


def uses_abs(b, h, q_idx, k_idx):
    return abs(q_idx - k_idx) < 3


def uses_helper(b, h, q_idx, k_idx):
    return causal(b, h, q_idx, k_idx)


def with_default(b, h, q_idx, k_idx, width=3):
    return q_idx - k_idx < width


def with_star(b, h, *indices):
    return indices[0] >= indices[1]


def with_keyword(b, h, q_idx, *, k_idx):
    return q_idx >= k_idx


def too_few(b, h, q_idx):
    return q_idx > 3


def returns_nothing(b, h, q_idx, k_idx):
    pass


def nests(b, h, q_idx, k_idx):
    def inner(x):
        return x

    return inner(q_idx) >= k_idx


def imports(b, h, q_idx, k_idx):
    import math

    return q_idx >= k_idx + math.inf


def hides_tl(tl, h, q_idx, k_idx):
    return q_idx >= k_idx


def sets_global(b, h, q_idx, k_idx):
    global WIDTH  # noqa: PLW0603
    WIDTH = 2
    return q_idx >= k_idx


def around(width: int) -> Callable[..., Any]:
    def closure(b, h, q_idx, k_idx):
        return q_idx - k_idx < width

    return closure


class Owner:
    def method(self, b, h, q_idx, k_idx):
        return q_idx >= k_idx


LAMBDA = lambda b, h, q_idx, k_idx: q_idx >= k_idx  # noqa: E731


@pytest.mark.parametrize(
    ("function", "kind", "aux", "source"),
    [
        (causal, "mask_mod", 0, "def mask_mod(b, h, q_idx, k_idx):\n    return q_idx >= k_idx\n"),
        (
            document,
            "mask_mod",
            1,
            "def mask_mod(b, h, q_idx, k_idx, doc):\n    mine = tl.load(doc + q_idx)\n"
            "    return mine == tl.load(doc + k_idx)\n",
        ),
        (
            alibi,
            "score_mod",
            0,
            "def score_mod(score, b, h, q_idx, k_idx):\n"
            "    return score - tl.abs(q_idx - k_idx) * tl.exp2(-(h + 1.0))\n",
        ),
    ],
)
def test_a_function_becomes_its_source_under_a_fixed_name(
    function: Callable[..., Any], kind: str, aux: int, source: str
) -> None:
    found = user_function(function, kind, aux)
    assert (found.name, found.source) == (kind, source)
    assert found.label == function.__name__
    assert user_function(function, kind, aux) is found, "its source is read once"


def test_the_same_words_are_the_same_kernel() -> None:
    def causal(b, h, q_idx, k_idx):
        """Another function, with a comment and another format."""
        return (
            q_idx >= k_idx  # below the diagonal
        )

    one, other = user_function(causal, "mask_mod"), user_function(globals()["causal"], "mask_mod")
    assert one == other
    assert one.digest == other.digest
    assert replace(one, label="x") == one, "what it is called is no part of it"


@pytest.mark.parametrize("function", [two_tables])
def test_aux_tensors_follow_the_own_arguments(function: Callable[..., Any]) -> None:
    found = score_mods(function, None, (torch.float32, torch.bool))
    assert found.aux == ("fp32", "i1")
    assert found.title.startswith(f"score_mod two_tables ({found.score_mod.digest})")
    assert found.title.endswith("aux fp32 i1")
    with pytest.raises(WorkloadError, match=r"takes 5 arguments and one for each of the 1 aux tensors: .*aux0\); got"):
        score_mods(function, None, (torch.float32,))


def test_numbers_and_builtins_of_triton_are_allowed() -> None:
    assert "float('-inf')" in user_function(capped, "score_mod").source


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (uses_global, "uses its arguments, tl and literals alone; uses_global uses WIDTH: write a number as a literal"),
        (uses_torch, "uses_torch uses torch: .*aux tensor"),
        (uses_abs, r"uses_abs uses abs: write tl\.abs"),
        (uses_helper, "uses_helper uses causal"),
        (around(3), "closure uses width"),
        (with_default, r"without defaults.*got \(b, h, q_idx, k_idx, width=3\) in with_default"),
        (with_star, r"got \(b, h, \*indices\) in with_star"),
        (with_keyword, "in with_keyword"),
        (too_few, r"takes 4 arguments .*got \(b, h, q_idx\) in too_few"),
        (returns_nothing, "returns a value, got returns_nothing"),
        (nests, "expressions and assignments, got 'def inner"),
        (imports, "expressions and assignments, got 'import math' in imports"),
        (sets_global, "expressions and assignments, got 'global WIDTH'"),
        (hides_tl, "tl is triton.language in mask_mod; hides_tl has a variable of this name"),
        (LAMBDA, "defined with def, got a lambda"),
        (functools.partial(with_default, width=2), "defined with def, .* got partial"),
        (Owner().method, "defined with def, .* got method"),
        (eval("lambda b, h, q, k: q >= k"), "defined with def, got a lambda"),
        ("q >= k", "defined with def, .* got str"),
    ],
)
def test_what_no_kernel_can_hold_is_refused(function: Any, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        user_function(function, "mask_mod")


def test_source_that_cannot_be_read_is_refused() -> None:
    space: dict[str, Any] = {}
    exec("def typed(b, h, q_idx, k_idx):\n    return q_idx >= k_idx\n", space)
    with pytest.raises(
        WorkloadError, match=r"source of mask_mod is in a file or a notebook cell.*typed cannot be read"
    ):
        user_function(space["typed"], "mask_mod")


def test_another_tl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(b, h, q_idx, k_idx):
        return tl.abs(q_idx - k_idx) < 9

    monkeypatch.setitem(globals(), "tl", torch)
    with pytest.raises(WorkloadError, match=r"tl is triton.language in mask_mod; where loads is defined it is torch"):
        user_function(loads, "mask_mod")


def test_aux_types_are_those_of_triton() -> None:
    with pytest.raises(WorkloadError, match=r"an aux tensor is one of float32, .*, got torch.complex64"):
        score_mods(None, document, (torch.complex64,))


def test_something_is_to_be_modified() -> None:
    with pytest.raises(WorkloadError, match="a score_mod or a mask_mod, got neither"):
        score_mods(None, None)
    with pytest.raises(WorkloadError, match="a block mask belongs to a mask_mod"):
        score_mods(alibi, None, block_mask=True)


def test_handles_name_what_was_registered() -> None:
    one = mods.handle_for(alibi, causal, (), False)
    assert mods.resolve(one) == score_mods(alibi, causal)
    assert mods.handle_for(alibi, causal) == mods.register(score_mods(alibi, causal)) == one
    assert mods.handle_for(alibi, causal, (), True) != one
    assert mods.handle_for(None, causal) != one
    assert 0 <= one < 1 << 63
    with pytest.raises(WorkloadError, match="handle 7 is unknown here"):
        mods.resolve(7)


def test_handles_are_constants_of_a_graph() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def model(x: torch.Tensor, aux: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return x + mods.handle_for(None, document, tuple(tensor.dtype for tensor in aux)) % 1000

    aux = (torch.zeros(3, dtype=torch.int32),)
    torch._dynamo.reset()
    found = torch.compile(model, fullgraph=True, backend=backend)(torch.zeros(3), aux)
    torch.testing.assert_close(found, model(torch.zeros(3), aux))
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_torch_compile_finds_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions are a constant of the graph; the tensors of the block mask and the aux tensors are its inputs."""
    calls = []

    def prepare(call: Call) -> Callable[..., torch.Tensor]:
        calls.append(call)
        return lambda q, k, v, scale, offset, features: q * features.aux[0][0]

    monkeypatch.setattr(serve, "prepare", prepare)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    doc = torch.tensor([3, 1, 2], dtype=torch.int32)

    def model(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return flashgen.attention(q, k, k, score_mod=shifted, mask_mod=document, aux=(doc,), block_mask=MASK) + 1

    torch._dynamo.reset()
    flashgen.reload()
    q, k = torch.randn(2, 4, MASK.seqlen_q, 16), torch.randn(2, 4, MASK.seqlen_k, 16)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend=backend)(q, k), q * 3 + 1)
    torch._dynamo.reset()
    flashgen.reload()
    assert len(graphs) == 1
    assert calls[0].mods == score_mods(shifted, document, (torch.int32,), block_mask=True)
    assert torch.equal(calls[0].features.block_mask.full_counts, MASK.full_counts)


def test_source_stays_in_the_process() -> None:
    """Databases know workloads, which have no place for it; keys have digests, which cannot be read back."""
    for value in (Workload, TuningRecord, Trial):
        assert not {"mods", "score_mod", "mask_mod"} & {f.name for f in fields(value)}
    plain = Specialization(direction="forward", dtype="bf16", head_dim=64, head_dim_v=64)
    spec = replace(plain, mods=score_mods(alibi, causal))
    assert spec.workload_class == plain.workload_class, "served from the records of calls without user code"
    assert spec.key == f"{plain.key}-score_{spec.mods.score_mod.digest}-mask_{spec.mods.mask_mod.digest}"
    with pytest.raises(WorkloadError):
        Specialization.parse(spec.key)


def test_a_block_mask_kernel_has_the_function_and_its_tensors() -> None:
    text = render_block_mask(score_mods(None, document, (torch.int32,)), MASK_BLOCK).text
    assert "@triton.jit\ndef mask_mod(b, h, q_idx, k_idx, doc):\n" in text
    assert "mask_mod(bh // nheads, bh % nheads, q_idx, k_idx, Aux0)" in text


MASK = BlockMask(
    partial_counts=torch.zeros(1, 4, 2, dtype=torch.int32),
    partial_indices=torch.zeros(1, 4, 2, 3, dtype=torch.int32),
    full_counts=torch.ones(1, 4, 2, dtype=torch.int32),
    full_indices=torch.zeros(1, 4, 2, 3, dtype=torch.int32),
    seqlen_q=130,
    seqlen_k=300,
)
MODS = ScoreMods(mask_mod=user_function(causal, "mask_mod"), block_mask=True)
CALL: dict[str, Any] = {"batch": 2, "nheads": 4, "seqlen_q": 130, "seqlen_k": 300, "device": torch.device("cpu")}


def test_a_block_mask_that_fits() -> None:
    check_block_mask(MASK, MODS, **CALL)
    check_block_mask(replace(MASK, mask_mod=MODS.mask_mod.digest), MODS, **CALL)
    assert MASK.sparsity() == pytest.approx(100 * (1 - 8 / 24))


@pytest.mark.parametrize(
    ("changes", "call", "message"),
    [
        ({}, {"seqlen_q": 131}, "seqlen_q 130 and seqlen_k 300 in a call with 131 and 300"),
        ({}, {"seqlen_k": 299}, "in a call with 130 and 299"),
        ({}, {"nheads": 8}, "all of the call's 2 sequences and 8 heads"),
        ({}, {"device": torch.device("meta")}, "partial_counts of a block mask is int32 .* on meta"),
        ({"mask_mod": "77aa0012"}, {}, "goes with the mask_mod that it was built from, got one of 77aa0012"),
        ({"block_size": 64}, {}, "block_size of a block mask is 128, got 64"),
        ({"full_counts": torch.ones(1, 4, 3, dtype=torch.int32)}, {}, "full_counts of a block mask is int32"),
        ({"full_indices": torch.ones(1, 4, 2, 3)}, {}, "full_indices of a block mask is int32 .* got torch.float32"),
        (
            {"partial_indices": torch.zeros(1, 4, 3, 2, dtype=torch.int32).mT},
            {},
            "partial_indices of a block mask is contiguous",
        ),
    ],
)
def test_a_block_mask_of_another_call_is_refused(changes: dict[str, Any], call: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        check_block_mask(replace(MASK, **changes), MODS, **{**CALL, **call})


def test_aux_tensors_are_contiguous_and_near() -> None:
    check_aux((torch.zeros(3), torch.zeros(2, 2)), torch.device("cpu"))
    with pytest.raises(WorkloadError, match=r"contiguous .* got aux\[1\] with shape \(2, 3\)"):
        check_aux((torch.zeros(3), torch.zeros(3, 2).T), torch.device("cpu"))
    with pytest.raises(WorkloadError, match=r"on the device of q \(meta\), got aux\[0\]"):
        check_aux((torch.zeros(3),), torch.device("meta"))


def test_a_block_mask_is_built_on_a_gpu() -> None:
    with pytest.raises(DeviceError, match="a block mask is built on a GPU, got cpu"):
        block_mask(causal, seqlen_q=10, seqlen_k=10, device="cpu")
    with pytest.raises(WorkloadError, match="batch of a block mask is at least 1, got 0"):
        block_mask(causal, 0, seqlen_q=10, seqlen_k=10)
    with pytest.raises(
        WorkloadError, match=r"aux tensors of a block mask are tensors of torch itself.* got FakeTensor"
    ):
        block_mask(document, seqlen_q=10, seqlen_k=10, aux=(FakeTensorMode().from_tensor(torch.zeros(10)),))


def test_the_default_config_walks_blocks() -> None:
    for name in ("h200", "a100", "4090", "mi300x"):
        device = find_device(name)
        spec = Specialization(direction="forward", dtype="bf16", head_dim=64, head_dim_v=64, mods=MODS)
        config = default_config(spec, device)
        rows = config.integer("block_m") if "block_m" in dict(config.knobs) else 64 * config.integer("warpgroups")
        assert MASK_BLOCK % rows == MASK_BLOCK % config.integer("block_n") == 0


WITH_LISTS = Specialization(direction="forward", dtype="bf16", head_dim=64, head_dim_v=64, mods=MODS)
WITHOUT = replace(WITH_LISTS, mods=replace(MODS, block_mask=False))


@pytest.mark.parametrize("changes", [{}, {"causal": True}, {"window": True}, {"head_dim": 128, "head_dim_v": 256}])
@pytest.mark.parametrize("spec", [WITH_LISTS, WITHOUT, replace(WITHOUT, varlen=True)], ids=["lists", "dense", "packed"])
def test_functions_are_computed_by_the_hopper_family_where_it_can(
    spec: Specialization, changes: dict[str, Any]
) -> None:
    assert default_config(replace(spec, **changes), find_device("h200")).family == "hopper_forward"
    assert default_config(replace(spec, **changes), find_device("a100")).family == "portable_forward"
    for other in ({"dtype": "fp32"}, {"aligned16": False}, {"head_dim": 32}):
        assert default_config(replace(spec, **other), find_device("h200")).family == "portable_forward"


def test_records_without_functions_are_served_as_functions_need_them(ladder: Ladder) -> None:
    """Those of the Hopper family alone; in the place of a tile that leaves no room for them the default is served."""
    workload = Workload.parse("b4-h32-hk8-s4096-d64")
    plain, h200 = workload.specialization, find_device("h200")
    without, with_lists = (replace(plain, mods=replace(MODS, block_mask=listed)) for listed in (False, True))
    usual = default_config(plain, h200)
    narrow = usual.replace(warpgroups=2, barriers="named", exp_order="data", v_stages=2)
    ladder.user(measured(workload))
    for spec in (without, with_lists):
        served = ladder.resolve(workload, h200, spec=spec)
        assert (served.rung, served.config) == (8, default_config(spec, h200))
        assert "it was the fastest without functions of the caller" in " ".join(served.skipped)
    for config in (usual, narrow):
        ladder.user(measured(workload, config=config))
        for spec in (without, with_lists):
            served = ladder.resolve(workload, h200, spec=spec)
            assert served.rung == 5
            assert invalid(served.config, spec, h200) is None
            assert served.config["softmax_reference"] == "running"
            kept = served.config.integer("v_stages") == config.integer("v_stages")
            assert kept is (config is narrow) or served.config == default_config(spec, h200)


def test_the_functions_of_the_page_are_functions_that_are_taken(tmp_path: Path) -> None:
    """Those of docs/score-mods.md; a GPU test runs the page."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "score-mods.md").read_text()
    blocks = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    sources = re.findall(r"^def (\w+)\((.*?)\):\n(    .*?)\n\n", blocks, re.MULTILINE | re.DOTALL)
    path = tmp_path / "page.py"
    path.write_text("".join(f"def {name}({arguments}):\n{body}\n" for name, arguments, body in sources))
    spec = importlib.util.spec_from_file_location("page", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert len(sources) >= 6
    for name, arguments, _ in sources:
        kind = "score_mod" if arguments.startswith("score,") else "mask_mod"
        own = arguments.split(", ")
        assert tuple(own[: len(mods.ARGUMENTS[kind])]) == mods.ARGUMENTS[kind]
        user_function(getattr(module, name), kind, len(own) - len(mods.ARGUMENTS[kind]))
