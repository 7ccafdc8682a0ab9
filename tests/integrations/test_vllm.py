"""flashgen as a backend of vLLM, whose classes are stand-ins here: what it declares, and what a step computes."""

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
from tests.integrations.vllm_stand_in import (
    OVERRIDES,
    AttentionBackendEnum,
    AttentionCGSupport,
    MultipleOf,
    vllm_stand_in,
)
from tests.logged import Logged

Tensor = torch.Tensor

BLOCK = 16
QUERIES, KEYS = (1, 1, 5, 20, 1), (33, 1, 40, 20, 17)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def vllm() -> Iterator[None]:
    with vllm_stand_in():
        yield


def backend() -> Any:
    module, name = import_module("flashgen.integrations.vllm").BACKEND.rsplit(".", 1)
    return getattr(import_module(module), name)


def test_it_registers_once_and_takes_the_name_from_nobody(logged: Logged) -> None:
    text = (Path(flashgen.__file__).parents[1] / "pyproject.toml").read_text()
    plugin = re.search(r'"vllm.general_plugins"\]\nflashgen = "(.+):(.+)"', text)
    assert plugin
    register = getattr(import_module(plugin[1]), plugin[2])
    assert register()
    assert register()
    assert OVERRIDES[AttentionBackendEnum.CUSTOM] == f"{backend().__module__}.{backend().__qualname__}"
    OVERRIDES[AttentionBackendEnum.CUSTOM] = "their.Backend"
    assert not register()
    assert OVERRIDES[AttentionBackendEnum.CUSTOM] == "their.Backend"
    assert any("their.Backend" in message for message in logged.messages)


def test_what_is_declared_is_what_the_kernels_do() -> None:
    found = backend()
    assert found.get_kv_cache_shape(7, 32, HEADS_K, DIM) == (7, 2, 32, HEADS_K, DIM)
    with pytest.raises(ValueError, match="multiple of 16, got 24"):
        found.get_kv_cache_shape(7, 24, HEADS_K, DIM)
    assert [size for size in (8, 16, 80, 256, 257) if found.supports_head_size(size)] == [16, 80, 256]
    assert found.supports_attn_type("decoder")
    assert not found.supports_attn_type("encoder_decoder")
    assert not any("fp8" in name for name in found.supported_kv_cache_dtypes)
    assert found.supports_compute_capability(SimpleNamespace(major=8, minor=0))
    assert not found.supports_compute_capability(SimpleNamespace(major=7, minor=5))
    assert found.get_builder_cls()._cudagraph_support is AttentionCGSupport.UNIFORM_BATCH
    # vLLM asks for each kind of cache, too; and whether lengths of queries may be wrong on the host, where steps of
    # decoding are counted
    assert (
        found.get_supported_kernel_block_sizes(object()) == found.get_supported_kernel_block_sizes() == [MultipleOf(16)]
    )
    assert not found.supports_device_cpu_query_lens_mismatch()


def common(queries: tuple[int, ...], keys: tuple[int, ...], **others: Any) -> SimpleNamespace:
    """A batch as vLLM describes it; pages of a sequence lie scattered, and every table has room for more."""
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    pages = -(-max(keys) // BLOCK) + 1
    table = torch.randperm(len(keys) * pages).reshape(len(keys), pages).int()
    slots = [
        int(table[i, p // BLOCK]) * BLOCK + p % BLOCK
        for i, (m, n) in enumerate(zip(queries, keys, strict=True))
        for p in range(n - m, n)
    ]
    return SimpleNamespace(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(keys, dtype=torch.int32),
        num_reqs=len(queries),
        num_actual_tokens=sum(queries),
        max_query_len=max(queries),
        max_seq_len=max(keys),
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots),
        **{"causal": True, **others},
    )


def builder() -> Any:
    return backend().get_builder_cls()(None, ["layer"], None, CPU)


def test_only_what_runs_now_counts_its_steps_of_decoding() -> None:
    made = builder()
    assert made.reorder_batch_threshold == 1
    assert made.build(0, common(QUERIES, KEYS)).num_decodes == 2  # not the last, which is behind a chunk
    assert made.build(0, common((1, 1, 1), (3, 40, 5))).num_decodes == 3
    assert made.build(0, common((2, 1), (3, 40))).num_decodes == 0
    captured = made.build_for_cudagraph_capture(common(QUERIES, KEYS))
    assert (captured.num_decodes, captured.max_query_len) == (0, sum(QUERIES))
    captured = made.build_for_cudagraph_capture(common((1, 1), (3, 40)))
    assert (captured.num_decodes, captured.max_query_len) == (2, 1)


@pytest.mark.parametrize(
    ("prefix", "others", "reason"), [(32, {}, "cascade attention.* 32 keys"), (0, {"causal": False}, "causal=False")]
)
def test_batches_that_are_not_served_are_refused(prefix: int, others: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        builder().build(prefix, common(QUERIES, KEYS, **others))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"attn_type": "encoder_decoder"}, "type encoder_decoder"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "cache in fp8_e4m3"),
        ({"use_alibi_sqrt": True}, "use_alibi_sqrt"),
        ({"chunk_lookback": 3}, "chunk_lookback=3"),
    ],
)
def test_layers_that_are_not_served_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(reason)):
        backend().get_impl_cls()(HEADS, DIM, 0.25, HEADS_K, **given)


def test_a_group_of_context_parallel_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = backend().get_impl_cls()
    monkeypatch.setattr(layer, "total_cp_world_size", 2)
    with pytest.raises(UnsupportedError, match="context parallelism"):
        layer(HEADS, DIM, 0.25, HEADS_K)


SLOPES = [0.5, 0.25, 0.125, 0.0625]
SCORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 7},
    "capped": {"logits_soft_cap": 2.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "alibi": {"alibi_slopes": SLOPES},
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("is_packed", [False, True], ids=["halves", "side-by-side"])
@pytest.mark.usefixtures("on_reference")
def test_a_mixed_batch_is_attention_of_each_sequence(name: str, is_packed: bool) -> None:
    torch.manual_seed(1)
    batch = common(QUERIES, KEYS)
    keys, values = ([torch.randn(n, HEADS_K, DIM).half() for n in KEYS] for _ in range(2))
    cache = filled(batch, keys, values, is_packed)
    padding = 3
    query = torch.randn(sum(QUERIES) + padding, HEADS, DIM).half()
    new = [pad(torch.cat([x[-m:] for x, m in zip(xs, QUERIES, strict=True)]), padding) for xs in (keys, values)]
    output = torch.full_like(query, 9.0)
    layer = backend().get_impl_cls()(HEADS, DIM, 0.3, HEADS_K, **SCORES[name])
    layer.do_kv_cache_update(None, *new, cache, batch.slot_mapping)
    assert layer.forward(None, query, *new, cache, builder().build(0, batch), output) is output
    assert (output[sum(QUERIES) :] == 9.0).all()
    for i, (m, n) in enumerate(zip(QUERIES, KEYS, strict=True)):
        first = int(batch.query_start_loc[i])
        expected = attention(query[first : first + m], keys[i], values[i], m, n, SCORES[name])
        torch.testing.assert_close(output[first : first + m].double(), expected, rtol=1e-3, atol=1e-3)


def pad(x: Tensor, rows: int) -> Tensor:
    return torch.cat([x, torch.full((rows, *x.shape[1:]), torch.nan, dtype=x.dtype)])


def filled(batch: SimpleNamespace, keys: list[Tensor], values: list[Tensor], is_packed: bool) -> Tensor:
    """A cache with the keys that were there before the batch, and NaN in all other slots."""
    table = batch.block_table_tensor
    shape = (table.numel(), HEADS_K, BLOCK, 2 * DIM) if is_packed else (table.numel(), 2, BLOCK, HEADS_K, DIM)
    cache = torch.full(shape, torch.nan, dtype=torch.float16)
    for i, (m, n) in enumerate(zip(QUERIES, KEYS, strict=True)):
        for p in range(n - m):
            page, place = int(table[i, p // BLOCK]), p % BLOCK
            if is_packed:
                cache[page, :, place] = torch.cat([keys[i][p], values[i][p]], -1)
            else:
                cache[page, :, place] = torch.stack([keys[i][p], values[i][p]])
    return cache


def test_a_step_makes_two_calls_and_its_views_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(flashgen, "append_kv", lambda *given, **named: made.append((given, named)))
    monkeypatch.setattr(
        flashgen, "attention_varlen", lambda *given, **named: [made.append((given, named)), given[0].clone()][1]
    )
    batch = common(QUERIES, KEYS)
    cache = torch.zeros(40, 2, BLOCK, HEADS_K, DIM)
    query, new = torch.randn(sum(QUERIES), HEADS, DIM), torch.randn(sum(QUERIES), HEADS_K, DIM)
    layer = backend().get_impl_cls()(HEADS, DIM, 0.3, HEADS_K, sliding_window=8)
    layer.do_kv_cache_update(None, new, new, cache, batch.slot_mapping)
    output = layer.forward(
        None, query, new, new, cache, builder().build(0, batch), torch.empty(sum(QUERIES), HEADS * DIM)
    )
    (appended, slots), (attended, options) = made
    assert appended[0] is new
    assert slots["slot_mapping"] is batch.slot_mapping
    assert attended[0] is query
    assert attended[3] is batch.query_start_loc
    assert attended[1] is appended[2]
    assert attended[2] is appended[3]
    assert attended[1].data_ptr() == cache.data_ptr()
    assert attended[2].data_ptr() == cache[:, 1].data_ptr()
    assert options["block_table"] is batch.block_table_tensor
    assert options["seqused_k"] is batch.seq_lens
    assert (options["num_decodes"], options["max_seqlen_q"], options["window"]) == (2, 20, (7, None))
    assert options["causal"] is True
    assert torch.equal(output.view_as(query), query)
    layer.forward(None, query, new, new, cache.clone(), builder().build(0, batch), torch.empty_like(query))
    assert made[2][0][1].data_ptr() != cache.data_ptr(), "another cache has other pages"


def test_values_of_another_width_lie_behind_their_keys() -> None:
    cache = torch.arange(3 * BLOCK * HEADS_K * (DIM + 4)).view(3, BLOCK, HEADS_K, DIM + 4).transpose(1, 2)
    keys, values = backend().get_impl_cls()(HEADS, DIM, 0.3, HEADS_K)._split(cache)
    assert keys.shape == (3, BLOCK, HEADS_K, DIM)
    assert values.shape == (3, BLOCK, HEADS_K, 4)
    assert torch.equal(values[2, 5, 1], cache[2, 1, 5, DIM:])


def test_a_layer_that_shares_a_cache_writes_none_and_a_profiling_run_is_0() -> None:
    layer = backend().get_impl_cls()(HEADS, DIM, 0.3, HEADS_K, kv_sharing_target_layer_name="layer 0")
    layer.do_kv_cache_update(None, None, None, None, None)
    output = torch.ones(3, HEADS, DIM)
    assert layer.forward(None, None, None, None, None, None, output).count_nonzero() == 0
    with pytest.raises(UnsupportedError, match="quantised outputs"):
        layer.forward(None, None, None, None, None, None, output, output_scale=torch.ones(1))
