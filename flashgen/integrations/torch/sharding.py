"""How `torch.distributed.tensor` may shard attention: over heads and over the batch, each rank on its own.

Megatron's tensor parallelism (Shoeybi et al. 2019, section 3) splits heads, data parallelism the batch; neither needs a
word between ranks, forward or backward, but for gradients of what all of them share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch

from flashgen.core.errors import UnsupportedError
from flashgen.core.features import table
from flashgen.runtime.autograd.ops import attention_backward_op, attention_train_op
from flashgen.runtime.ops.forward import (
    attention_features_lse_op,
    attention_features_op,
    attention_lse_op,
    attention_op,
)
from flashgen.runtime.ops.schemas import GRADIENT_FIELDS

BATCH, HEADS = "batch", "heads"

OPS = (
    attention_op,
    attention_lse_op,
    attention_features_op,
    attention_features_lse_op,
    attention_train_op,
    attention_backward_op,
)

ROWS = ("q", "k", "v", "out", "dout")
SUMS = ("lse", "dlse")
SCORES = ("bias", "mask")

PLACED = ("mods", "rng_state", "block_mask")
"""Arguments that know places in the whole batch and among all heads: with one of them nothing is sharded."""

PACKED = "cu_seqlens_q"


def register_sharding_rules() -> None:
    """Let DTensors go through `flashgen.attention` sharded over heads, over the batch, or over both on other mesh dims.

    Heads are sharded where the heads of keys divide evenly, so that every rank has whole groups; the batch where it
    divides evenly. Windows, softcaps, ALiBi slopes, sinks, biases and masks follow; gradients of what ranks share are
    `Partial`. Packed sequences are sharded over heads alone. Sequences are never sharded
    (`context_parallel_attention` does that), and calls with dropout or with functions of the caller are replicated:
    both know places in the whole. Registering twice is registering once.

    Raises:
        UnsupportedError: this torch has other internals than the rules are written for.
    """
    try:
        found = [import_module(f"torch.distributed.tensor.{name}") for name in ("_op_schema", "_ops.utils")]
        schema_info, expand = found[0].RuntimeSchemaInfo, found[1].expand_to_full_mesh_op_strategy
        propagator = import_module("torch.distributed.tensor").DTensor._op_dispatcher.sharding_propagator
        register = propagator.register_op_strategy
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            "sharding rules are written for torch 2.11 to 2.13, whose DTensor has what that of torch "
            f"{torch.__version__} lacks: {error}"
        ) from error
    for op in OPS:
        # from where on values decide: torch's `register_sharding` takes the first int, which lies behind `bshd`
        first = next(i for i, one in enumerate(op._schema.arguments) if "Tensor" not in str(one.type))
        register(op, _strategy_of(expand), schema_info(first, needs_pytree=True))


def _strategy_of(expand: Any) -> Any:
    """What torch asks for the ways to shard a call."""

    def strategy(schema: Any) -> Any:
        call = _ShardedCall(schema)
        ways = [[*call.outputs(way), *call.inputs(way)] for way in call.ways()]
        found = expand(schema.get_mesh_from_args(), schema, ways, input_index=len(schema.op._schema.returns))
        found.strategies = [one for one in found.strategies if call.is_even(one)]
        return found

    return strategy


class _ShardedCall:
    """A call of an op by the names of its arguments, of which torch leaves out the last ones that are as by default."""

    def __init__(self, schema: Any) -> None:
        declared = schema.op._schema.arguments
        self.given: dict[str, Any] = {one.name: one.default_value for one in declared}
        self.given |= {one.name: value for one, value in zip(declared, schema.args_schema, strict=False)}
        self.tensors = [(name, spec) for name, value in self.given.items() for spec in _specs(value)]
        self.returns = len(schema.op._schema.returns)
        self.is_backward = "dout" in self.given
        self.nheads_dim = 2 if self.given["bshd"] else 1

    def ways(self) -> Iterator[str]:
        """Replicated, and what the call can be sharded over."""
        yield ""
        if not any(self.given.get(name) for name in PLACED):
            yield HEADS
            if self.given.get(PACKED) is None:
                yield BATCH

    def inputs(self, way: str) -> list[Any]:
        """Where each tensor of the call lies."""
        return [self._placement(way, name, len(spec.shape), tuple(spec.shape)) for name, spec in self.tensors]

    def outputs(self, way: str) -> list[Any]:
        """Where each result lies."""
        if not self.is_backward:
            return [self._placement(way, name, 4, ()) for name in ("out", "lse")[: self.returns]]
        return [
            *(self._placement(way, name, 4, ()) for name in "qkv"),
            *(self._shared(way, f) for f in GRADIENT_FIELDS),
        ]

    def is_even(self, found: Any) -> bool:
        """Whether each rank gets as many heads of keys, and of the batch, as the others."""
        by_name = dict(zip((name for name, _ in self.tensors), found.input_specs, strict=True))
        return all(
            by_name[name].shape[dim] % _shards(by_name[name], dim) == 0
            for name, dim in (("q", 0), ("k", self.nheads_dim))
        )

    def _placement(self, way: str, name: str, rank: int, shape: tuple[int, ...]) -> Any:
        from torch.distributed.tensor import Replicate, Shard

        dim: int | None = None
        if name in ROWS:
            dim = {BATCH: 0, HEADS: self.nheads_dim}.get(way)
        elif name in SUMS:
            dim = {BATCH: 0, HEADS: 1}.get(way)
        elif name in SCORES:  # broadcast from the right over (batch, nheads, seqlen_q, seqlen_k)
            dim = {BATCH: rank - 4, HEADS: rank - 3}.get(way)
            dim = None if dim is None or dim < 0 or shape[dim] == 1 else dim
        elif name == "alibi_slopes":
            dim = {BATCH: 0 if rank == 2 else None, HEADS: rank - 1}.get(way)
        elif (name, way) in (("sinks", HEADS), ("q_offset_tensor", BATCH)):
            dim = 0
        return Replicate() if dim is None else Shard(dim)

    def _shared(self, way: str, field: str) -> Any:
        """Where the gradient of a feature lies: as the feature does, or in parts to be summed; others are empty."""
        from torch.distributed.tensor import Partial, Replicate

        specs = _specs(self.given.get(field))
        if not way or not specs or not self.given[_NEEDED[field]]:
            return Replicate()
        placed = self._placement(way, field, len(specs[0].shape), tuple(specs[0].shape))
        return Partial() if isinstance(placed, Replicate) else placed


_NEEDED = {one.field: one.needed.name for one in table.gradients()}


def _specs(value: Any) -> list[Any]:
    """The tensors of an argument, as torch describes them."""
    if hasattr(value, "strategies"):
        return [value.strategies[0].output_spec]
    children = getattr(value, "children", value if isinstance(value, (list, tuple)) else ())
    return [spec for child in children for spec in _specs(child)]


def _shards(spec: Any, dim: int) -> int:
    return math.prod(spec.mesh.size(i) for i, placement in enumerate(spec.placements) if placement.is_shard(dim))
