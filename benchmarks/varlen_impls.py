"""The implementations that run packed sequences, each called as its users call it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton.language as tl
from torch.nn.functional import scaled_dot_product_attention

import flashgen
from benchmarks import fa4
from benchmarks.flex import compiled_flex, flex_module, forget_compiled
from benchmarks.flex_variants import DEFAULT, FlexVariants, Variant, flash_variant
from benchmarks.impls import FA3_MODULE, Call, fa3_version, torch_version
from benchmarks.varlen_cases import Pack, PackTensors, padded, unpadded

TORCH_MODULE = "torch.nn.attention.varlen"

Tensor = torch.Tensor
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def _as_it_is(out: Tensor) -> Tensor:
    return out


@dataclass(frozen=True, kw_only=True)
class Ready:
    """An implementation on the tensors of a batch.

    Attributes:
        call: a forward pass of copy n, or both passes, which return (dq, dk, dv, out).
        rows: the output as (rows, heads, head_dim), None where it is that of another batch.
        share: the visible pairs of the batch over those that it computes on a batch of its own.
    """

    call: Call
    rows: Callable[[Tensor], Tensor] | None = _as_it_is
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenImpl:
    """An implementation: why it cannot run a batch, or None, and what runs it.

    Where it has `variants`, the fastest of them races in its place, under its name and with a version of its own.
    """

    name: str
    version: Callable[[], str]
    unsupported: Callable[[Pack], str | None]
    prepare: Callable[[Pack, PackTensors], Ready]
    variants: PackFlex | None = None


def _call(
    pack: Pack, found: tuple[list[Tensor], list[Tensor], list[Tensor]], dout: list[Tensor], attend: Attend
) -> Call:
    """`attend` on the n-th tensors, with its backward pass where the batch trains."""
    q, k, v = found
    if not pack.trains:
        return Call(run=lambda n: attend(q[n], k[n], v[n]))

    def both(n: int) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            out = attend(q[n], k[n], v[n])
        return (*torch.autograd.grad(out, (q[n], k[n], v[n]), dout[n]), out)

    return Call(run=both)


def _packed(pack: Pack, found: PackTensors, attend: Attend) -> Ready:
    return Ready(call=_call(pack, (found.q, found.k, found.v), found.dout, attend))


def _flashgen(pack: Pack, found: PackTensors) -> Ready:
    w = pack.workload
    keys = None if pack.is_self_attention or pack.is_paged else found.ends_k
    options: dict[str, Any] = {"max_seqlen_q": w.seqlen_q, "max_seqlen_k": w.seqlen_k, "causal": w.causal}
    if pack.is_paged:
        options |= {"block_table": found.table, "seqused_k": found.lens_k, "num_decodes": pack.num_decodes}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashgen.attention_varlen(q, k, v, found.ends_q, keys, **options)  # type: ignore[no-any-return]

    return _packed(pack, found, attend)


def documents(b, h, q_idx, k_idx, ids):  # type: ignore[no-untyped-def]
    """A user's mask of documents."""
    return tl.load(ids + q_idx) == tl.load(ids + k_idx)


def causal_documents(b, h, q_idx, k_idx, ids):  # type: ignore[no-untyped-def]
    """The same, and no key behind a query."""
    return (tl.load(ids + q_idx) == tl.load(ids + k_idx)) & (q_idx >= k_idx)


def _document_of_rows(pack: Pack, device: torch.device) -> Tensor:
    lengths = torch.tensor(pack.queries, device=device)
    return torch.repeat_interleave(torch.arange(len(pack.queries), device=device), lengths)


def _masked(pack: Pack, found: PackTensors) -> Ready:
    """All rows as one sequence of `flashgen.attention`, whose mask_mod and block mask hide other documents."""
    ids = _document_of_rows(pack, found.q[0].device).int()
    mask_mod = causal_documents if pack.workload.causal else documents
    blocks = flashgen.block_mask(mask_mod, seqlen_q=len(ids), seqlen_k=len(ids), aux=(ids,))
    options: dict[str, Any] = {"mask_mod": mask_mod, "aux": (ids,), "block_mask": blocks, "layout": "bshd"}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flashgen.attention(q[None], k[None], v[None], **options)
        assert isinstance(out, Tensor)
        return out[0]

    return _packed(pack, found, attend)


def _dense(pack: Pack, found: PackTensors) -> Ready:
    dense = pack.dense
    rows = dense.batch * dense.seqlen_q

    def grown(tensors: list[Tensor]) -> list[Tensor]:
        again = [torch.cat([one.detach()] * (1 + rows // len(one)))[:rows] for one in tensors]
        parts = [one.view(dense.batch, dense.seqlen_q, *one.shape[1:]).contiguous() for one in again]
        return [one.requires_grad_(pack.trains) for one in parts]

    tensors = grown(found.q), grown(found.k), grown(found.v)
    dout = [one.detach() for one in grown(found.dout)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flashgen.attention(q, k, v, causal=dense.causal, layout="bshd")
        assert isinstance(out, Tensor)
        return out

    share = pack.workload.all_pairs / dense.all_pairs
    return Ready(call=_call(pack, tensors, dout, attend), rows=None, share=share)


def _why_not_dense(pack: Pack) -> str | None:
    return None if pack.is_self_attention else "it computes sequences with as many keys as queries"


def _why_not_masked(pack: Pack) -> str | None:
    return None if pack.is_self_attention else "documents in one sequence have as many keys as queries"


def _why_not_torch(pack: Pack) -> str | None:
    if importlib.util.find_spec(TORCH_MODULE) is None:
        return f"this torch has no {TORCH_MODULE}"
    if pack.is_paged:
        return "it is timed without pages here"
    if not pack.is_self_attention and "window_size" not in _torch_parameters():
        return "this torch's varlen_attn has no causal mask for other keys than queries"
    return None


def _torch_parameters() -> frozenset[str]:
    return frozenset(inspect.signature(importlib.import_module(TORCH_MODULE).varlen_attn).parameters)


def _torch(pack: Pack, found: PackTensors) -> Ready:
    """Where heads share keys and this torch's `varlen_attn` has no word for it, the call repeats these, as users do."""
    w, names = pack.workload, _torch_parameters()
    function = importlib.import_module(TORCH_MODULE).varlen_attn
    group = w.nheads // w.nheads_k
    options: dict[str, Any] = {"enable_gqa": True} if group > 1 and "enable_gqa" in names else {}
    repeats = 1 if options else group
    if w.causal:
        options |= {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if repeats > 1:
            k, v = (one.repeat_interleave(repeats, 1) for one in (k, v))
        out: Tensor = function(q, k, v, found.ends_q, found.ends_k, w.seqlen_q, w.seqlen_k, **options)
        return out

    return _packed(pack, found, attend)


def _why_not_flex(pack: Pack) -> str | None:
    return None if pack.is_self_attention else "documents in one sequence have as many keys as queries"


def _flex(pack: Pack, found: PackTensors, variant: Variant = DEFAULT) -> Ready:
    module, w, device = flex_module(), pack.workload, found.q[0].device
    rows = found.q[0].shape[0]
    document = _document_of_rows(pack, device)

    def same(b: Any, h: Any, i: Any, j: Any) -> Any:
        visible = document[i] == document[j]
        return visible & (i >= j) if w.causal else visible

    mask = module.create_block_mask(same, None, None, rows, rows, device=device, BLOCK_SIZE=variant.block_size)
    compiled = compiled_flex()
    options: dict[str, Any] = {"block_mask": mask, "enable_gqa": w.nheads != w.nheads_k}
    if variant.options:
        options["kernel_options"] = dict(variant.options)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (one.transpose(0, 1)[None] for one in (q, k, v))
        out: Tensor = compiled(*heads, **options)
        return out[0].transpose(0, 1)

    return _packed(pack, found, attend)


def _flex_alone(pack: Pack, found: PackTensors) -> Ready:
    forget_compiled()
    return _flex(pack, found)


class PackFlex:
    """FlexAttention's variants for batches of packed sequences: those of `flex_variants`, of which the near ones stay.

    Args:
        flash: whether FlashAttention-4 may be the backend.
    """

    def __init__(self, *, flash: bool) -> None:
        self._variants = FlexVariants(self._of, flash=flash)  # type: ignore[arg-type]

    def next(self, pack: Pack, seen: Mapping[str, float]) -> VarlenImpl | None:
        """The variant to try after those that were `seen`, or None."""
        return self._variants.next(pack.workload, seen)  # type: ignore[return-value]

    def _of(self, variant: Variant) -> VarlenImpl:
        unsupported = _why_not_flex if variant.is_triton else _why_not_flash
        return VarlenImpl(
            name="flex",
            version=lambda: variant.version,
            unsupported=unsupported,
            prepare=partial(_flex, variant=variant),
        )


def _why_not_flash(pack: Pack) -> str | None:
    if flash_variant(pack.workload) is None:
        return "FlashAttention-4 cannot be its backend here"
    return _why_not_flex(pack)


def with_flex(impls: Sequence[VarlenImpl], choice: str) -> tuple[VarlenImpl, ...]:
    """`impls` with FlexAttention as one of `flex_variants.CHOICES` says."""
    if choice == "default":
        return tuple(impls)
    variants = PackFlex(flash=choice == "best")
    return tuple(replace(impl, variants=variants) if impl.name == "flex" else impl for impl in impls)


def _why_not_padded(pack: Pack) -> str | None:
    return None if pack.is_self_attention else "scaled_dot_product_attention has no causal mask for each length"


def _padded(pack: Pack, found: PackTensors) -> Ready:
    w, lengths = pack.workload, pack.queries
    tensors = tuple(
        [padded(t, lengths).requires_grad_(pack.trains) for t in one] for one in (found.q, found.k, found.v)
    )
    dout = [padded(one, lengths) for one in found.dout]
    mask = None
    if not w.causal:  # queries before the padding see no key of it
        places = torch.arange(max(lengths), device=found.q[0].device)
        mask = (places < torch.tensor(lengths, device=places.device)[:, None])[:, None, None, :]
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": w.causal, "enable_gqa": w.nheads != w.nheads_k}
    call = _call(pack, tensors, dout, lambda q, k, v: scaled_dot_product_attention(q, k, v, **options))
    return Ready(call=call, rows=lambda out: unpadded(out, lengths))


def _why_not_fa3(pack: Pack) -> str | None:
    if importlib.util.find_spec(FA3_MODULE) is None:
        return f"{FA3_MODULE} is not installed"
    name = "flash_attn_with_kvcache" if pack.is_paged else "flash_attn_varlen_func"
    if not hasattr(importlib.import_module(FA3_MODULE), name):
        return f"this build has no {name}"
    return "this build has no backward pass" if pack.trains else None


def _why_not_fa4(pack: Pack) -> str | None:
    reason = fa4.limits(pack.workload)
    if reason is None and not hasattr(importlib.import_module(fa4.MODULE), "flash_attn_varlen_func"):
        return "this version has no packed sequences"
    return reason


def _flash_attention(module: str) -> Callable[[Pack, PackTensors], Ready]:
    def prepare(pack: Pack, found: PackTensors) -> Ready:
        function, w = importlib.import_module(module).flash_attn_varlen_func, pack.workload
        names = inspect.signature(function).parameters
        given = {"cu_seqlens_q": found.ends_q, "cu_seqlens_k": found.ends_k, "causal": w.causal}
        given |= {"max_seqlen_q": w.seqlen_q, "max_seqlen_k": w.seqlen_k}
        if pack.is_paged:
            del given["cu_seqlens_k"]
            given |= {"seqused_k": found.lens_k, "page_table": found.table}
        options = {name: value for name, value in given.items() if name in names}

        return _packed(pack, found, _output_of(function, options))

    return prepare


def _fa3(pack: Pack, found: PackTensors) -> Ready:
    """Over pages by the function for caches, which takes packed queries, too."""
    if not pack.is_paged:
        return _flash_attention(FA3_MODULE)(pack, found)
    function, w = importlib.import_module(FA3_MODULE).flash_attn_with_kvcache, pack.workload
    options: dict[str, Any] = {"cache_seqlens": found.lens_k, "page_table": found.table, "causal": w.causal}
    options |= {"cu_seqlens_q": found.ends_q, "max_seqlen_q": w.seqlen_q}
    return _packed(pack, found, _output_of(function, options))


def _output_of(function: Callable[..., Any], options: dict[str, Any]) -> Attend:
    """A call of such a function for its output alone; some versions return the LSE, too."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q, k, v, **options)
        first: Tensor = out[0] if isinstance(out, tuple) else out
        return first

    return attend


def _everything(pack: Pack) -> str | None:
    return None


IMPLS: tuple[VarlenImpl, ...] = (
    VarlenImpl(name="flashgen", version=lambda: flashgen.__version__, unsupported=_everything, prepare=_flashgen),
    VarlenImpl(name="flashgen-dense", version=lambda: flashgen.__version__, unsupported=_why_not_dense, prepare=_dense),
    VarlenImpl(
        name="flashgen-mask", version=lambda: flashgen.__version__, unsupported=_why_not_masked, prepare=_masked
    ),
    VarlenImpl(name="torch-varlen", version=torch_version, unsupported=_why_not_torch, prepare=_torch),
    VarlenImpl(name="flex", version=torch_version, unsupported=_why_not_flex, prepare=_flex_alone),
    VarlenImpl(name="sdpa-padded", version=torch_version, unsupported=_why_not_padded, prepare=_padded),
    VarlenImpl(name="fa3", version=fa3_version, unsupported=_why_not_fa3, prepare=_fa3),
    VarlenImpl(name="fa4", version=fa4.version, unsupported=_why_not_fa4, prepare=_flash_attention(fa4.MODULE)),
)

no_grad_of = {True: contextlib.nullcontext, False: torch.no_grad}
"""Around the calls of a batch, by whether it trains."""
