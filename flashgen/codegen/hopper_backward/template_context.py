"""What the templates of the Hopper backward families need beside their parameters."""

from __future__ import annotations

from flashgen.codegen.common_groups import SUM_ROWS, heads_per_tile, leaves_sums, query_shares
from flashgen.codegen.common_mods import block_names, has_blocks, host_features
from flashgen.codegen.common_scores import is_positional, window_edges
from flashgen.codegen.common_sequences import SEQUENCE_FLAGS, SEQUENCE_POINTERS, SEQUENCE_SIZES
from flashgen.codegen.common_types import GL_DTYPES, TORCH_DTYPES
from flashgen.codegen.common_wgmma import FIRST_NAMED_BARRIER, NUM_SMS, ROWS, SM90, THREADS_PER_WARPGROUP, block
from flashgen.codegen.hopper_backward import resources, scores
from flashgen.codegen.hopper_backward.kernels import prepare_rows
from flashgen.core.config import Config
from flashgen.core.workload import Specialization

PLACE = ["first_key", "h_k", "q_block", "q_start", "seqlen_q", "k_start", "k_rows", "seqlen_k"]
"""Of a tile of packed sequences: first key, head, the first block of the sequence's sums, first rows, rows and keys."""

_WALK = ["first_head", "tile_heads"]
"""The query heads of a tile that walks over some of a group: the first one, and how many."""


def values(spec: Specialization, config: Config) -> dict[str, object]:
    """The values of the template for the kernels of a config, by name."""
    fused = resources.is_fused(config)
    block_d, block_dv = block(spec.head_dim), block(spec.head_dim_v)
    dq_columns = resources.dq_columns(spec, config)
    return {
        **dict(config.knobs),
        "fused": fused,
        # whether tiles of the same kernel convert sums of dq; the orders of the steps
        "converts": resources.converts(config),
        "adds_dq": resources.adds_dq(config),
        "writes_dq": resources.writes_dq(config),
        "staggered": resources.is_staggered(config),
        "prefetches_scores": resources.prefetches_scores(config),
        "part_blocks": resources.PART_BLOCKS,
        "num_sms": NUM_SMS,
        "main": f"{config.family}_{'main' if fused else 'dkdv'}",
        "head_dim": spec.head_dim,
        "head_dim_v": spec.head_dim_v,
        "block_d": block_d,
        "block_dv": block_dv,
        "d_parts": resources.parts(spec.head_dim, config),
        "dv_parts": resources.parts(spec.head_dim_v, config),
        # keys of a warpgroup
        "rows": ROWS,
        "do_stages": resources.DO_STAGES,
        "block_n": resources.block_n(spec),
        # whether dk and dv of a tile take a warpgroup each
        "wide": resources.is_wide(spec),
        # of a chunk: what one warpgroup adds to dq at once
        "dq_columns": dq_columns,
        "dq_chunk": ROWS * dq_columns,
        "dq_v_stages": 0 if fused else resources.dq_v_stages(spec, config, SM90),
        # of 128 keys and 64 queries at the diagonal a quarter is visible
        "skips": fused and spec.causal and config["block_m"] == ROWS and not has_blocks(spec),
        "prepare_rows": prepare_rows(spec),
        "maxnreg": resources.MAXNREG,
        "consumer_registers": resources.CONSUMER_REGISTERS,
        "producer_registers": resources.PRODUCER_REGISTERS,
        "dtype": spec.dtype,
        "gl_dtype": GL_DTYPES[spec.dtype],
        "torch_dtype": TORCH_DTYPES[spec.dtype],
        **_features(spec),
        **scores.values(spec),
        **_heads(spec, config),
        **_sequences(spec),
        **_names(spec, config),
        **_synchronisation(spec, config),
    }


def _features(spec: Specialization) -> dict[str, object]:
    positional = spec.causal or spec.window
    edges = window_edges(spec)
    seen = ["offset", *edges] if positional else []
    hidden = scores.visibility_arguments(spec)
    return {
        "causal": spec.causal,
        "window": spec.window,
        "positional": positional,
        "has_offset": is_positional(spec),
        # offsets beyond the lengths still change what a window shows, and what a slope adds
        "offset_unbounded": (spec.window or spec.alibi) and not spec.varlen,
        # rows of K and V that no query sees may hold NaN, and are cleared in shared memory; the last query of a packed
        # sequence stands at its last key
        "clears_hidden": spec.window or (spec.causal and not spec.varlen),
        "offset_tensor": spec.offset_tensor and is_positional(spec),
        "offset_name": _offset_name(spec),
        # names of what functions of the roles take and return
        "query_block_arguments": (["first_key", *seen] if positional else [])
        + ["seqlen_q", *(["seqlen_k"] if spec.window else [])],
        "key_block_arguments": (["first_row", *seen, "seqlen_q"] if positional else []) + ["seqlen_k"],
        "seen_arguments": [*seen, "seqlen_q", "seqlen_k"],
        "visibility": _visibility(spec),
        "visibility_arguments": ["own_key", *hidden, *seen, "seqlen_k"],
        # of the next head; the one behind the last head of a call is none
        "next_visibility_arguments": [*_of_head("gl.minimum(h, nheads - 1)", hidden), *seen, "seqlen_k"],
        "listed_visibility_arguments": [*_of_head("gl.minimum(next_h, nheads - 1)", hidden), *seen, "seqlen_k"],
        "host_features": host_features(spec),
    }


def _of_head(head: str, names: list[str]) -> list[str]:
    return ["own_key", *(head if name == "h" else name for name in names)]


def _offset_name(spec: Specialization) -> str:
    if spec.varlen or not is_positional(spec):
        return ""
    return "QOffset" if spec.offset_tensor else "q_offset"


def _heads(spec: Specialization, config: Config) -> dict[str, object]:
    """Names of the numbers that all roles are handed, and of what a tile is to them; the query heads it walks over."""
    some, shares, offset = leaves_sums(config), query_shares(config), _offset_name(spec)
    lengths = ["all_blocks", *(["total_k"] if some else [])] if spec.varlen else ["seqlen_q", "seqlen_k"]
    sizes = [*([] if spec.varlen else ["batch"]), "nheads", "group_size", *lengths]
    numbers = [*sizes, *([offset] if offset else []), *window_edges(spec), *scores.mask_names(spec)]
    head = [
        "first_key",
        *([] if spec.varlen and not scores.by_head(spec) else ["b"]),
        "h_k",
        *(["part_head"] if some else []),
        *(_WALK if heads_per_tile(config) else []),
    ]
    own = [*head, *(["offset"] if is_positional(spec) else []), *([] if has_blocks(spec) else ["first", "blocks"])]
    own += [*(["all_shown"] if spec.mask else []), *(["has_queries"] if shares > 1 else [])]
    return {
        "heads_per_tile": heads_per_tile(config),
        "query_shares": shares,
        "leaves_sums": some,
        "sum_rows": SUM_ROWS,
        # the head of a tile: of keys, or one of the parts of its group
        "tile_head": "part_head" if some else "h_k",
        "sizes": [*numbers, *block_names(spec, by_keys=True)],
        "dq_sizes": [*numbers, *block_names(spec)],
        "tile_values": [*own, *(PLACE[2:] if spec.varlen else [])],
        "place": [PLACE[0], "part_head" if some else "h_k", *PLACE[2:]],
    }


def _sequences(spec: Specialization) -> dict[str, object]:
    """What roles are told of packed sequences: their lengths, where a tile lies, and what its sums begin with."""
    dp_start = "dp_start" if spec.varlen else "neg_delta"
    return {
        "varlen": spec.varlen,
        "lengths": [*SEQUENCE_POINTERS, *SEQUENCE_FLAGS, *SEQUENCE_SIZES],
        "dq_place": ["first_row", "h", "q_start", "q_rows", "seqlen_q", "k_start", "seqlen_k", "q_block"],
        "dp_start": dp_start,
        "dp_start_pointer": "DpStart" if spec.varlen else "NegDelta",
    }


def _visibility(spec: Specialization) -> list[str]:
    """What hides scores of a warpgroup's keys: by key, and for all of them at once."""
    if spec.window:
        return ["from_query", "all_from", "to_query", "all_to"]
    return ["from_query", "all_from"] if spec.causal else ["exists", "all_exist"]


def _names(spec: Specialization, config: Config) -> dict[str, object]:
    """What the roles are handed together."""
    fused, wide, persistent = resources.is_fused(config), resources.is_wide(spec), config["persistent"]
    of_dq = ["dq_desc"] if resources.writes_dq(config) else ["dq_acc_desc"] if fused else []
    descs = ["q_desc", "k_desc", "v_desc", "do_desc", "lse_start_desc"]
    descs.append("dp_start_desc" if spec.varlen else "neg_delta_desc")
    buffers = ["q_tiles", "k_tiles", "v_tiles", "do_tiles", "lse_tiles", "delta_tiles"]
    buffers += ["p_tiles"] if wide else ["ds_tiles", "dq_tiles"] if fused else []
    return {
        "descs": [*descs, *of_dq, *resources.key_gradients(config)],
        "buffers": [*buffers, *(["next_tiles"] if persistent else [])],
    }


def _synchronisation(spec: Specialization, config: Config) -> dict[str, object]:
    """Barriers by name: slots of a group (0: it is a single one) and arrivals that complete a phase."""
    fused = resources.is_fused(config)
    slots: dict[str, tuple[object, int]] = {"k_full": (0, 1), "v_full": (0, 1)}
    slots |= {"q_full": ("Q_STAGES", 1), "do_full": ("DO_STAGES", 1)}
    if config["persistent"]:
        slots |= {"kv_empty": (0, 2), "tile_full": (2, 1), "tile_empty": (2, 4 if fused else 2)}
    dq_slots = {"q_full": (2, 1), "k_full": ("DQ_STAGES", 1), "v_full": ("DQ_V_STAGES", 1)}
    return {
        "named_barriers": resources.numbered(resources.named_barriers(spec, config)),
        "dq_named_barriers": resources.numbered(resources.dq_named_barriers(config)),
        "first_barrier": FIRST_NAMED_BARRIER,
        "ring_threads": 2 * THREADS_PER_WARPGROUP + 32,
        "hand_over_threads": THREADS_PER_WARPGROUP + (32 if fused else THREADS_PER_WARPGROUP),
        "barriers": list(slots),
        "barrier_slots": slots,
        "dq_barriers": list(dq_slots),
        "dq_barrier_slots": dq_slots,
    }
