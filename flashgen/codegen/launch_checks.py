"""`LaunchChecks`: what a kernel was compiled for, so that a launcher that stands alone can refuse everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashgen.codegen.common_scores import is_positional
from flashgen.codegen.common_types import TORCH_DTYPES, bias_dtype, storage
from flashgen.codegen.families import unsupported
from flashgen.codegen.family import KernelFamily, KernelSpec
from flashgen.core.device import CATALOGUE
from flashgen.core.workload import Specialization


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCheck:
    """What a kernel was compiled for of a bias or a mask.

    Attributes:
        name: "bias" or "mask".
        dtype: torch's name of it.
        shared: all queries have the same values.
        whole: tiles come by TMA, which does not repeat the values of one query for the others.
        aligned: it is contiguous along the keys, with other strides and the start at multiples of 16 bytes.
    """

    name: str
    dtype: str
    shared: bool
    whole: bool
    aligned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchChecks:
    """What the kernels of one config were compiled for, beside the widths of heads.

    Attributes:
        dtype: torch's name of the dtype of q.
        capability: the CUDA compute capability of the only architecture that runs them; empty where there are several.
        backward: whether the output, its gradient and the LSE are arguments, too.
        aligned: pointers and strides are multiples of 16 bytes, because code or TMA needs them so.
        scores: of a bias and a mask, where they are compiled in.
        features: other features that are compiled in, by the names of their arguments.
        sink_dtype: torch's name of the dtype of sinks.
        aux: how many tensors the user's functions have.
        offset: what a query offset is: a "tensor", an "integer", or "" where nothing depends on it.
        dbias: whether the gradient of a bias is made in the bias's own shape.
    """

    dtype: str
    capability: tuple[int, ...]
    backward: bool
    aligned: bool
    scores: tuple[ScoreCheck, ...]
    features: frozenset[str]
    sink_dtype: str
    aux: int
    offset: str
    dbias: bool

    @classmethod
    def of(cls, row: KernelFamily, spec: Specialization, kernels: Sequence[KernelSpec]) -> LaunchChecks:
        """Those of a config of `row` for `spec`, whose kernels these are."""
        types = {parameter.name: parameter.type for kernel in kernels for parameter in kernel.parameters}
        described = {name for name, kind in types.items() if kind.startswith("tensordesc")}
        present = {"window": spec.window, "softcap": spec.softcap, "alibi_slopes": spec.alibi, "sinks": spec.sink}
        present |= {"block_mask": spec.mods is not None and spec.mods.block_mask, "rng_state": spec.dropout}
        return cls(
            dtype=TORCH_DTYPES[storage(spec)],
            capability=_only_capability(row, spec),
            backward=spec.direction == "backward",
            aligned=spec.aligned16 or bool(described),
            scores=_score_checks(spec, described),
            features=frozenset(name for name, there in present.items() if there),
            sink_dtype=TORCH_DTYPES[spec.sink_dtype or "fp32"],
            aux=len(spec.mods.aux) if spec.mods else 0,
            offset=("tensor" if spec.offset_tensor else "integer") if is_positional(spec) else "",
            dbias=spec.bias_grad and spec.bias == "full",
        )

    @property
    def has_packed(self) -> bool:
        """Whether there are tensors that are read without strides."""
        return self.backward or self.offset == "tensor" or bool(self.features & {"alibi_slopes", "sinks", "rng_state"})

    @property
    def has_aligned_scores(self) -> bool:
        """Whether a bias or a mask must be aligned."""
        return any(score.aligned for score in self.scores)

    @property
    def has_shared_scores(self) -> bool:
        """Whether a bias or a mask must be the same for all queries."""
        return any(score.shared for score in self.scores)

    @property
    def has_whole_scores(self) -> bool:
        """Whether a bias or a mask must have values for every query."""
        return any(score.whole for score in self.scores)


def _only_capability(row: KernelFamily, spec: Specialization) -> tuple[int, ...]:
    archs = {device.capability for device in CATALOGUE if unsupported(row, spec, device) is None}
    only = archs.pop() if len(archs) == 1 else 0
    return divmod(only, 10) if only else ()


def _score_checks(spec: Specialization, described: set[str]) -> tuple[ScoreCheck, ...]:
    kinds = (("bias", spec.bias, bias_dtype(spec)), ("mask", spec.mask, ""))
    return tuple(
        ScoreCheck(
            name=name,
            dtype=TORCH_DTYPES.get(dtype, "bool"),
            shared=kind == "keys",
            whole=f"{name}_desc" in described,
            aligned=spec.aligned_scores,
        )
        for name, kind, dtype in kinds
        if kind
    )
