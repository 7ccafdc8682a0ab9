"""Offsets, windows and bounds of lengths as symbolic numbers of a graph: a new value makes no new graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

import flashgen
from flashgen.core.errors import WorkloadError
from flashgen.flash_attn import flash_attn_func, flash_attn_varlen_func
from flashgen.runtime.ops import serve
from tests.tiers import every, first

pytestmark = pytest.mark.usefixtures("gpu", "fresh_compiler")

ENDS = torch.tensor([0, 3, 8], dtype=torch.int32)
DECODES = torch.tensor([0, 1, 8], dtype=torch.int32)
USED = torch.tensor([5, 6], dtype=torch.int32)
TABLE = torch.arange(8, dtype=torch.int32).view(2, 4)

LIMIT = 8
"""Graphs of a function, of which torch makes no more; as it is by itself."""

Call = Callable[[torch.Tensor, int], torch.Tensor]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "gpu_index", lambda tensor: 0)
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", LIMIT)  # benchmarks raise it


def dense(x: torch.Tensor, **named: Any) -> torch.Tensor:
    return flashgen.attention(x[None], x[None], x[None], layout="bshd", **named)


def paged(x: torch.Tensor, number: int, num_decodes: int = 0) -> torch.Tensor:
    pages = x.new_zeros(9, 4, 2, 16)
    given = {"max_seqlen_q": number, "seqused_k": USED, "block_table": TABLE, "num_decodes": num_decodes}
    return flashgen.attention_varlen(x.detach(), pages, pages, DECODES, **given)


TRAINED: dict[str, Call] = {
    "offset": lambda x, n: dense(x, causal=True, q_offset=n),
    "window": lambda x, n: dense(x, window=(n, 0), softcap=2.0),
    "window beside a tensor": lambda x, n: dense(x, window=(n, n), sinks=x[0, :, 0]),
    "longest": lambda x, n: flashgen.attention_varlen(x, x, x, ENDS, max_seqlen_q=n, causal=True),
    "version 2": lambda x, n: flash_attn_func(x[None], x[None], x[None], window_size=(n, -1)),
    "version 2, packed": lambda x, n: flash_attn_varlen_func(x, x, x, ENDS, ENDS, n, n, causal=True),
}
SERVED: dict[str, Call] = {
    "pages": paged,
    "mixed": lambda x, n: paged(x, n, num_decodes=n // 100 + 1),
    "decode": lambda x, n: flashgen.attention_decode(
        *(one.detach().bfloat16() for one in (x[:2, None], x.view(2, 4, 2, 16), x.view(2, 4, 2, 16))),
        USED.clamp(max=4),
        window=(n, None),
    ),
}


@pytest.mark.parametrize("name", every(2, [*TRAINED, "pages", "mixed"]))
def test_torch_compile_makes_one_graph_for_all_numbers(name: str) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    x = torch.randn(8, 2, 16, requires_grad=name in TRAINED)
    compiled = torch.compile((TRAINED | SERVED)[name], fullgraph=True, backend=backend)
    for number in range(5, 5 + LIMIT + 2):
        out = compiled(x, number)
        assert out.shape[-3:] == x.shape
        if x.requires_grad:
            (gradient,) = torch.autograd.grad(out.sum(), x)
            assert gradient.shape == x.shape
    assert len(graphs) == 2  # one of a number, and one of any, once there was another


class Model(torch.nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return self.call(x, length.shape[0])


@pytest.mark.parametrize("strict", first(1, [False, True]))
@pytest.mark.parametrize("name", every(2, [*TRAINED, *SERVED]))
def test_torch_export_has_sizes_in_the_place_of_numbers(name: str, strict: bool) -> None:
    x, length = torch.randn(8, 2, 16, requires_grad=name in TRAINED), torch.zeros(9)
    sizes = {"x": None, "length": {0: torch.export.Dim("length", min=5, max=100)}}
    exported = torch.export.export(Model((TRAINED | SERVED)[name]), (x, length), dynamic_shapes=sizes, strict=strict)
    (called,) = (node for node in exported.graph.nodes if "flashgen.attention" in str(node.target))
    assert any(isinstance(one, torch.fx.Node) and isinstance(one.meta["val"], torch.SymInt) for one in called.args)


def test_a_symbolic_number_keeps_the_rules() -> None:
    x, length = torch.randn(8, 2, 16), torch.zeros(9)
    sizes = {"x": None, "length": {0: torch.export.Dim("length", min=5, max=100)}}
    for call in (lambda x, n: dense(x, window=(4 - n, 0)), lambda x, n: paged(x, 4 - n)):
        with pytest.raises(WorkloadError, match=r"an int of at least 0|must be at least 0"):
            torch.export.export(Model(call), (x, length), dynamic_shapes=sizes, strict=False)
