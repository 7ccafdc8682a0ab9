"""flashgen as a backend of SGLang, whose classes are stand-ins here: registration, metadata, what a batch computes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashgen
from flashgen.core.errors import UnsupportedError
from tests.integrations.engines import DIM, HEADS, HEADS_K, attention
from tests.integrations.sglang_stand_in import ATTENTION_BACKEND_CHOICES, ATTENTION_BACKENDS, sglang_stand_in

Tensor = torch.Tensor

CONTEXT, SLOTS = 48, 256
KEYS, NEW = (33, 1, 40, 20), (4, 1, 40, 3)
"""Keys of each request, and how many of them are those of its new queries."""


@pytest.fixture(autouse=True)
def sglang() -> Iterator[None]:
    with sglang_stand_in():
        import_module("flashgen.integrations.sglang").register()
        yield


class Pool:
    """Keys and values by slot, which hold NaN where nothing was written."""

    def __init__(self) -> None:
        self.keys, self.values = (torch.full((SLOTS, HEADS_K, DIM), torch.nan).half() for _ in range(2))

    def set_kv_buffer(self, layer: Any, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self.keys[slots], self.values[slots] = k.view(-1, HEADS_K, DIM), v.view(-1, HEADS_K, DIM)

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.keys

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.values


def runner(page: int = 1, **others: Any) -> SimpleNamespace:
    """A model runner whose requests have their pages anywhere in the pool."""
    generator = torch.Generator().manual_seed(page)
    pages = torch.randperm(SLOTS // page, generator=generator)[: len(KEYS) * (CONTEXT // page)].view(len(KEYS), -1)
    slots = (pages[:, :, None] * page + torch.arange(page)).flatten(1).int()
    given = {
        "server_args": SimpleNamespace(speculative_algorithm=None),
        "model_config": SimpleNamespace(is_encoder_decoder=False, context_len=CONTEXT),
        "kv_cache_dtype": torch.float16,
        "page_size": page,
        "use_mla_backend": False,
        "token_to_kv_pool": Pool(),
        "req_to_token_pool": SimpleNamespace(req_to_token=slots),
    }
    return SimpleNamespace(**(given | others))


def layer(**others: Any) -> SimpleNamespace:
    given = {"tp_q_head_num": HEADS, "tp_k_head_num": HEADS_K, "qk_head_dim": DIM, "v_head_dim": DIM, "scaling": 0.3}
    kind = SimpleNamespace(value="decoder")
    plain = {"layer_id": 0, "logit_cap": 0.0, "sliding_window_size": -1, "is_cross_attention": False, "attn_type": kind}
    return SimpleNamespace(**(given | plain | others))


def mode(name: str) -> SimpleNamespace:
    names = ("idle", "decode", "mixed")
    return SimpleNamespace(**{f"is_{kind}": lambda kind=kind: name == kind for kind in names})


def batch(made: SimpleNamespace, new: tuple[int, ...], requests: list[int], on_host: bool = True) -> SimpleNamespace:
    """A batch of requests, each with its last queries to compute."""
    lengths = [KEYS[request] for request in requests]
    table = made.req_to_token_pool.req_to_token
    slots = [table[r, n - m : n] for r, m, n in zip(requests, new, lengths, strict=True)]
    return SimpleNamespace(
        forward_mode=mode("decode" if set(new) == {1} else "extend"),
        req_pool_indices=torch.tensor(requests),
        seq_lens=torch.tensor(lengths),
        seq_lens_cpu=torch.tensor(lengths) if on_host else None,
        extend_seq_lens=torch.tensor(new),
        extend_seq_lens_cpu=list(new),
        out_cache_loc=torch.cat(slots).long(),
        spec_info=None,
    )


def tensors() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = [[torch.randn(n, h, DIM, generator=generator).half() for n in KEYS] for h in (HEADS, HEADS_K, HEADS_K)]
    return made[0], made[1], made[2]


def filled(made: SimpleNamespace, new: tuple[int, ...], keys: list[Tensor], values: list[Tensor]) -> None:
    """The keys that were cached before a batch."""
    for request, (m, n) in enumerate(zip(new, KEYS, strict=True)):
        slots = made.req_to_token_pool.req_to_token[request, : n - m].long()
        made.token_to_kv_pool.set_kv_buffer(None, slots, keys[request][: n - m], values[request][: n - m])


SCORES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "window": ({"sliding_window_size": 6}, {}, {"sliding_window": 7}),
    "capped": (
        {"logit_cap": 2.0, "attn_type": "decoder"},
        {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"logits_soft_cap": 2.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    ),
}
"""Of a layer, of its call, and of the same in float64."""


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("new", [NEW, (1, 1, 1, 1)], ids=["prompts", "steps"])
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.usefixtures("on_reference")
def test_a_batch_is_attention_of_each_request(name: str, new: tuple[int, ...], page: int) -> None:
    of_layer, of_call, plain = SCORES[name]
    made, (queries, keys, values) = runner(page), tensors()
    filled(made, new, keys, values)
    backend = ATTENTION_BACKENDS["flashgen"](made)
    order = [2, 0, 3, 1]
    given = batch(made, tuple(new[r] for r in order), order, on_host=name == "plain")
    backend.init_forward_metadata(given)
    q, k, v = (torch.cat([x[r][-new[r] :] for r in order]).flatten(1) for x in (queries, keys, values))
    found = backend.forward(q, k, v, layer(**of_layer), given, **of_call)
    assert found.shape == (sum(new), HEADS * DIM)
    expected = [attention(queries[r][-new[r] :], keys[r], values[r], new[r], KEYS[r], plain) for r in order]
    torch.testing.assert_close(found.double(), torch.cat(expected).flatten(1), rtol=1e-3, atol=1e-3)


def padded(requests: list[int], lengths: list[int], name: str = "decode", **others: Any) -> SimpleNamespace:
    """What SGLang hands over before a graph is captured or replayed."""
    given = {"req_pool_indices": torch.tensor(requests), "seq_lens": torch.tensor(lengths), "seq_lens_cpu": None}
    return SimpleNamespace(**(given | {"forward_mode": mode(name), "spec_info": None} | others))


@pytest.mark.parametrize("is_older", [False, True], ids=["out_graph", "capture and replay"])
@pytest.mark.usefixtures("on_reference")
def test_a_graph_reads_what_a_replay_fills(is_older: bool) -> None:
    made, (queries, keys, values) = runner(16), tensors()
    filled(made, (0, 0, 0, 0), keys, values)
    backend = ATTENTION_BACKENDS["flashgen"](made)
    backend.init_cuda_graph_state(4, 4)
    fill = backend.get_cuda_graph_seq_len_fill_value()
    first = padded([0, 0], [fill, fill])

    def prepare(given: SimpleNamespace, in_capture: bool) -> None:
        if not is_older:
            backend.init_forward_metadata_out_graph(given, in_capture=in_capture)
            backend.init_forward_metadata_in_graph(given)
            return
        common = (None, given.forward_mode, given.spec_info)
        if in_capture:
            backend.init_forward_metadata_capture_cuda_graph(2, 2, given.req_pool_indices, given.seq_lens, *common)
        else:
            backend.init_forward_metadata_replay_cuda_graph(
                2, given.req_pool_indices, given.seq_lens, 0, *common, given.seq_lens_cpu
            )

    prepare(first, in_capture=True)
    captured = backend.forward_metadata
    for requests, is_on_host in (([2, 0], True), ([3, 1], False)):
        given = batch(made, (1, 1), requests, on_host=is_on_host)
        prepare(given, in_capture=False)
        assert backend.forward_metadata.table.data_ptr() == captured.table.data_ptr()
        assert captured.seq_lens.tolist() == [KEYS[r] for r in requests]
        q = torch.stack([queries[r][-1] for r in requests]).flatten(1)
        found = backend.forward(q, None, None, layer(), given, save_kv_cache=False)
        expected = [attention(queries[r][-1:], keys[r], values[r], 1, KEYS[r], {}) for r in requests]
        torch.testing.assert_close(found.double(), torch.cat(expected).flatten(1), rtol=1e-3, atol=1e-3)
    for other in (padded([0], [1], "verify"), padded([0], [1], spec_info=object())):
        with pytest.raises(UnsupportedError, match="CUDA graphs of anything but"):
            prepare(other, in_capture=True)


def test_it_registers_itself_once() -> None:
    text = (Path(flashgen.__file__).parents[1] / "pyproject.toml").read_text()
    plugin = re.search(r'"sglang.srt.plugins"\]\nflashgen = "(.+):(.+)"', text)
    assert plugin
    getattr(import_module(plugin[1]), plugin[2])()
    assert ATTENTION_BACKEND_CHOICES == ["triton", "flashgen"]
    assert list(ATTENTION_BACKENDS) == ["flashgen"]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"use_mla_backend": True}, "latent attention"),
        ({"server_args": SimpleNamespace(speculative_algorithm="EAGLE")}, "speculative decoding"),
        ({"model_config": SimpleNamespace(is_encoder_decoder=True, context_len=8)}, "encoders"),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "cache in torch.float8_e4m3fn"),
        ({"server_args": SimpleNamespace(speculative_algorithm=None, dcp_size=2)}, "context parallelism"),
        ({"token_to_kv_pool": SimpleNamespace(full_to_swa_index_mapping=None)}, "disable-hybrid-swa-memory"),
        ({"token_to_kv_pool": SimpleNamespace(requires_physical_write_loc=True)}, "other places than its buffers"),
        ({"token_to_kv_pool": SimpleNamespace(kv_cache_layout="hnd")}, "a pool in the layout hnd"),
        (
            {"token_to_kv_pool": SimpleNamespace(full_kv_pool=SimpleNamespace(requires_physical_write_loc=True))},
            "other places than its buffers",
        ),
        (
            {"token_to_kv_pool": SimpleNamespace(full_kv_pool=SimpleNamespace(kv_cache_layout="hnd"))},
            "a pool in the layout hnd",
        ),
    ],
)
def test_servers_that_are_not_served_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        ATTENTION_BACKENDS["flashgen"](runner(**given))


@pytest.mark.parametrize(
    ("of_layer", "of_call", "reason"),
    [
        ({"is_cross_attention": True}, {}, "cross-attention"),
        ({"attn_type": "encoder_only"}, {}, "type encoder_only"),
        ({"use_irope": True}, {}, "use_irope"),
        ({"xai_temperature_len": 1024}, {}, "xai_temperature_len"),
        ({"logit_cap": 30.0, "logit_capping_method": "sigmoid"}, {}, "capped by sigmoid"),
        ({}, {"q_rope": torch.ones(1)}, "q_rope"),
        ({}, {"return_lse": True}, "return_lse"),
    ],
)
def test_layers_that_are_not_served_are_refused(of_layer: Any, of_call: Any, reason: str) -> None:
    made = runner()
    backend, given = ATTENTION_BACKENDS["flashgen"](made), batch(made, (1,), [1])
    backend.init_forward_metadata(given)
    with pytest.raises(UnsupportedError, match=reason):
        backend.forward(torch.zeros(1, HEADS * DIM), None, None, layer(**of_layer), given, **of_call)


def test_an_idle_rank_computes_nothing_and_metadata_come_first() -> None:
    made = runner()
    backend = ATTENTION_BACKENDS["flashgen"](made)
    idle = SimpleNamespace(forward_mode=mode("idle"))
    backend.init_forward_metadata(idle)
    assert backend.forward(torch.zeros(0, HEADS * DIM), None, None, layer(), idle).shape == (0, HEADS * DIM)
    with pytest.raises(UnsupportedError, match="nobody called it"):
        backend.forward(torch.zeros(1, HEADS * DIM), None, None, layer(), batch(made, (1,), [1]), save_kv_cache=False)
