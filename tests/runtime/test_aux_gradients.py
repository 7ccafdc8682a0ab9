"""Gradients of what a score_mod loads, by autograd: which are asked for, where they are summed, and what is refused."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import triton.language as tl
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils.checkpoint import checkpoint

import flashgen
import flashgen.reference
from flashgen.core.errors import UnsupportedError
from flashgen.core.workload import Specialization
from flashgen.launch.backward import BackwardTensors
from tests.fakes.gpu import EmulatedGpu, FakeGpu, OnGpu, emulated_by

Tensor = torch.Tensor
SQ, SK = 9, 12


def bent(score, b, h, q_idx, k_idx, table, ids, slopes):  # type: ignore[no-untyped-def]
    place = table + h * 40 + k_idx - q_idx + 20
    return score * tl.load(slopes + tl.load(ids + k_idx)) + tl.load(place)


def tables(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    table, slopes = (torch.randn(n, generator=generator).to(dtype).requires_grad_() for n in (80, 5))
    return table, (torch.arange(SK) % 5).int(), slopes


def qkv(seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((1, 2, SQ, 16), (1, 1, SK, 16), (1, 1, SK, 16))
    return tuple(torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)


def gradients(call: Any, inputs: tuple[Tensor, ...], aux: tuple[Tensor, ...]) -> list[Tensor | None]:
    out, lse = call(*inputs, score_mod=bent, aux=aux, causal=True, return_lse=True)
    weights = torch.arange(out.numel()).view(out.shape) % 7 - 3.0
    leaves = [one for one in (*inputs, *aux) if one.requires_grad]
    return list(torch.autograd.grad((out * weights).sum() + lse[..., 1:].sum(), leaves, allow_unused=True))


@dataclass
class ByReference(EmulatedGpu):
    """Plans that compute by `flashgen.reference`, and add gradients of aux tensors where kernels do."""

    sums: list[tuple[Tensor, ...]] = field(default_factory=list)

    def make_plan(self, kernel: Any, spec: Specialization, *others: Any) -> Any:
        FakeGpu.make_plan(self, kernel, spec, *others)

        def launch(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
            out, lse, _, _, features = rest
            for target, value in zip((out, lse), self._attend(q, k, v, features.aux), strict=True):
                if target is not None:
                    target.copy_(value)

        return launch

    def make_backward_plan(self, kernel: Any, spec: Specialization, *others: Any) -> Any:
        FakeGpu.make_backward_plan(self, kernel, spec, *others)
        assert spec.mods is not None
        count, learned = len(spec.mods.aux), spec.mods.aux_grads

        def launch(t: BackwardTensors, scale: Any, offset: Any, features: Any, with_neg_delta: bool = True) -> Tensor:
            aux, sums = features.aux[:count], features.aux[count:][::-1]
            assert len(sums) == len(learned)
            assert t.dout.data_ptr() or not t.dout.numel()
            assert all(one.dtype == torch.float32 and not one.any() for one in sums)
            inputs = [one.detach().requires_grad_() for one in (t.q, t.k, t.v)]
            leaves = [one.detach().requires_grad_(n in learned) for n, one in enumerate(aux)]
            with torch.enable_grad():
                out, lse = self._attend(*inputs, tuple(leaves))
                asked = [*inputs, *(leaves[n] for n in learned)]
                dlse = torch.zeros_like(lse) if t.dlse is None else t.dlse
                found = torch.autograd.grad((out, lse), asked, (t.dout, dlse))
            for target, value in zip((t.dq, t.dk, t.dv, *sums), found, strict=True):
                target.copy_(value)
            self.sums.append(sums)
            return torch.zeros_like(lse)

        return launch

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, aux: tuple[Tensor, ...]) -> Any:
        return flashgen.reference.attention(q, k, v, score_mod=bent, aux=aux, causal=True, return_lse=True)


@pytest.fixture
def by_reference(emulated: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> ByReference:
    return emulated_by(ByReference, emulated, monkeypatch)


def test_the_reference_differentiates_by_what_is_loaded() -> None:
    inputs, (table, ids, slopes) = qkv(), tables()
    i, j = torch.arange(SQ)[:, None], torch.arange(SK)
    h = torch.arange(2)[:, None, None]
    wide = [one.double().detach().requires_grad_() for one in (*inputs, table, slopes)]
    s = wide[0] @ wide[1].repeat_interleave(2, 1).mT * 0.25
    s = (s * wide[4][ids[j].long()] + wide[3][h * 40 + j - i + 20]).masked_fill(j > i + SK - SQ, -torch.inf)
    out, lse = torch.softmax(s, -1) @ wide[2].repeat_interleave(2, 1), torch.logsumexp(s, -1)
    weights = torch.arange(out.numel()).view(out.shape) % 7 - 3.0
    right = torch.autograd.grad((out * weights).sum() + lse[..., 1:].sum(), wide)
    found = gradients(flashgen.reference.attention, inputs, (table, ids, slopes))
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other.float(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("how", ["eager", "checkpoint"])
@pytest.mark.parametrize("learned", [(0,), (2,), (0, 2)])
def test_each_learned_tensor_gets_its_gradient(by_reference: ByReference, learned: tuple[int, ...], how: str) -> None:
    aux = tuple(one if n in learned else one.detach() for n, one in enumerate(tables()))
    call: Any = flashgen.attention
    call = functools.partial(checkpoint, call, use_reentrant=False) if how == "checkpoint" else call
    right = gradients(flashgen.reference.attention, qkv(), aux)
    for inputs in (qkv(), qkv()):  # the second call is remembered
        for one, other in zip(gradients(call, inputs, aux), right, strict=True):
            torch.testing.assert_close(one, other)
    assert [len(sums) for sums in by_reference.sums] == [len(learned)] * 2
    fixed = tuple(one.detach() for one in qkv())
    (*_, found) = gradients(call, fixed, aux)
    torch.testing.assert_close(found, right[-1])


def test_a_gradient_has_the_dtype_of_its_tensor(by_reference: ByReference) -> None:
    table, ids, slopes = tables(torch.bfloat16)
    found = gradients(flashgen.attention, qkv(), (table, ids, slopes))
    assert [one.dtype for one in found if one is not None] == [torch.float32] * 3 + [torch.bfloat16] * 2
    assert {one.dtype for sums in by_reference.sums for one in sums} == {torch.float32}


def test_kernels_are_of_the_tensors_that_are_learned(by_reference: ByReference) -> None:
    table, ids, slopes = tables()
    for aux in ((table, ids, slopes), (table.detach(), ids, slopes), (table, ids, slopes)):
        gradients(flashgen.attention, qkv(), aux)
    assert [len(sums) for sums in by_reference.sums] == [2, 1, 2]
    asked = [spec.mods.aux_grads for spec, _ in by_reference.compiled if spec.mods and spec.direction == "backward"]
    assert asked == [(0, 2), (2,)]
    assert {spec.mods.aux_grads for spec, _ in by_reference.compiled if spec.mods} == {(), (0, 2), (2,)}


def sine(score, b, h, q_idx, k_idx, table):  # type: ignore[no-untyped-def]
    return score + tl.sin(tl.load(table + h))


def shown(b, h, q_idx, k_idx, table):  # type: ignore[no-untyped-def]
    return tl.load(table + h) > k_idx


def halved(score, b, h, q_idx, k_idx, table):  # type: ignore[no-untyped-def]
    return score * 0.5


def test_what_cannot_be_summed_is_refused_with_the_rule(by_reference: ByReference) -> None:
    inputs, table = qkv(), torch.zeros(9, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"no gradient through tl.sin of what depends on an aux .*line 2 "):
        flashgen.attention(*inputs, score_mod=sine, aux=(table,))
    with pytest.raises(UnsupportedError, match=r"summed in the order of their arrival: a deterministic call has none"):
        flashgen.attention(*inputs, score_mod=bent, aux=tables(), deterministic=True)
    with pytest.raises(UnsupportedError, match=r"no gradient through a mask_mod alone.* got aux\[0\]"):
        flashgen.attention(*inputs, mask_mod=shown, aux=(table,))
    with pytest.raises(UnsupportedError, match=r"no gradient through a mask_mod alone.* got aux\[0\]"):
        flashgen.attention(*inputs, score_mod=halved, mask_mod=shown, aux=(table,))
    with pytest.raises(UnsupportedError, match=r"torch.func or a dispatch mode"):
        torch.func.grad(lambda one: flashgen.attention(*inputs, score_mod=sine, aux=(one,)).sum())(table)
    out = flashgen.attention(*inputs, score_mod=bent, aux=tables())
    with pytest.raises(UnsupportedError, match="first derivatives only"):
        torch.autograd.grad(out.sum(), inputs[0], create_graph=True)
    with pytest.raises(UnsupportedError, match=r"none for several gradients of the output in one"):
        torch.autograd.grad(out, inputs[0], torch.ones(3, *out.shape), is_grads_batched=True)
    with torch.no_grad():
        assert not flashgen.attention(*inputs, score_mod=bent, aux=tables(), return_lse=True)[0].requires_grad


def test_a_gradient_that_a_collective_returns_is_waited_for(by_reference: ByReference) -> None:
    inputs, aux = qkv(), tables()
    out = flashgen.attention(*inputs, score_mod=bent, aux=aux)
    leaves, dout = (*inputs, aux[0], aux[2]), torch.ones_like(out)
    expected = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    found = torch.autograd.grad(out, leaves, AsyncCollectiveTensor(dout), retain_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    with pytest.raises(UnsupportedError, match="nor as subclasses of tensors"):
        torch.autograd.grad(out, leaves, dout.as_subclass(OnGpu))


def test_offsets_of_another_class_have_no_gradient_beside_learned_tensors(by_reference: ByReference) -> None:
    offsets = torch.zeros(1, dtype=torch.int32).as_subclass(OnGpu)
    with pytest.raises(UnsupportedError, match="nor as subclasses of tensors"):
        flashgen.attention(*qkv(), score_mod=bent, aux=tables(), causal=True, q_offset=offsets)


def test_explain_knows_which_tensors_are_learned(by_reference: ByReference) -> None:
    given: dict[str, Any] = {"score_mod": bent, "aux": tables(), "causal": True}
    assert flashgen.explain(*qkv(), direction="backward", **given).specialization.key.endswith("-daux0-daux2")
    assert "daux" not in flashgen.explain(*qkv(), **given).specialization.key


def test_a_call_without_rows_leaves_its_tables_a_gradient_of_0(by_reference: ByReference) -> None:
    q, k, v = (one.detach()[:, :, :0] for one in qkv())
    table, ids, slopes = tables()
    out = flashgen.attention(q, k, v, score_mod=bent, aux=(table, ids, slopes))
    found = torch.autograd.grad(out.sum(), (table, slopes))
    assert not any(bool(one.any()) for one in found)


def test_a_learned_table_is_refused_by_name_under_a_compiler(by_reference: ByReference) -> None:
    """Dynamo would else name a reader of fields that it does not know."""
    compiled: Any = torch.compile(flashgen.attention, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"have no gradient through a mask_mod alone, nor under torch\.compile"):
        compiled(*qkv(), score_mod=bent, aux=tables())
