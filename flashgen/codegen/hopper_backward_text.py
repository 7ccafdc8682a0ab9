"""What the templates of the Hopper backward families need beside their parameters."""

from __future__ import annotations

from flashgen.codegen import hopper_backward_resources as resources
from flashgen.codegen.hopper_forward import GL_DTYPES, HOPPER, TORCH_DTYPES
from flashgen.codegen.hopper_resources import FIRST_NAMED_BARRIER, ROWS, THREADS_PER_WARPGROUP, block
from flashgen.codegen.portable_text import is_positional
from flashgen.codegen.score_parameters import window_edges
from flashgen.core.config import Config
from flashgen.core.workload import Specialization

PREPARE_ROWS = 32
"""Rows of a program of the first kernel; 16 to 128 took the same time."""

DQ_TEXTS = {
    "inline": "a warpgroup that computed a part of it starts the copy engine, and waits for it a step later",
    "writer": "a warp of its own for each warpgroup starts the copy engine and waits for it",
    "atomic": "added from registers, 16 bytes at a time",
}
STARTS_TEXTS = {
    "late": "dp gets its start while s is computed",
    "early": "both products get their start before the first begins, each sum in a register of its own",
}


def values(spec: Specialization, config: Config, entry: str) -> dict[str, object]:
    """The values of the template for the kernels of a config, by name."""
    dq_path = str(dict(config.knobs).get("dq_path", ""))
    block_d, block_dv = block(spec.head_dim), block(spec.head_dim_v)
    dq_columns = resources.dq_columns(spec, config)
    return {
        **dict(config.knobs),
        "fused": bool(dq_path),
        "main": f"{entry}_main" if dq_path else f"{entry}_dkdv",
        "dq_path": dq_path,
        "head_dim": spec.head_dim,
        "head_dim_v": spec.head_dim_v,
        "block_d": block_d,
        "block_dv": block_dv,
        "rows": ROWS,
        "block_n": resources.block_n(spec),
        "wide": resources.is_wide(spec),
        "dq_columns": dq_columns,
        "dq_chunk": ROWS * dq_columns,
        "dq_v_stages": 0 if dq_path else resources.dq_v_stages(spec, config, HOPPER),
        "prepare_rows": PREPARE_ROWS,
        "maxnreg": resources.MAXNREG,
        "consumer_registers": resources.CONSUMER_REGISTERS,
        "producer_registers": resources.PRODUCER_REGISTERS,
        "dtype": spec.dtype,
        "gl_dtype": GL_DTYPES[spec.dtype],
        "torch_dtype": TORCH_DTYPES[spec.dtype],
        "order_text": _order_text(config),
        "starts_text": STARTS_TEXTS[str(config["starts"])],
        "dq_text": DQ_TEXTS.get(dq_path, ""),
        **_features(spec),
        **_names(spec, dq_path),
        **_synchronisation(spec, config, dq_path),
    }


def _features(spec: Specialization) -> dict[str, object]:
    positional = is_positional(spec)
    offset = ("QOffset" if spec.offset_tensor else "q_offset") if positional else ""
    edges = window_edges(spec)
    extra = [*([offset] if offset else []), *edges]
    sizes = ["batch", "nheads", "group_size", "seqlen_q", "seqlen_k", *extra]
    seen = ["offset", *edges] if positional else []
    return {
        "causal": spec.causal,
        "window": spec.window,
        "positional": positional,
        "far": spec.window,
        "mask": "",
        "clears_hidden": positional,
        "offset_tensor": spec.offset_tensor and positional,
        "offset_name": offset,
        # query i sees no key behind i + this
        "right": "offset" if spec.causal else "offset + window_right",
        "sizes": sizes,
        "dq_sizes": sizes,
        "query_block_arguments": (["first_key", *seen] if positional else [])
        + ["seqlen_q", *(["seqlen_k"] if spec.window else [])],
        "key_block_arguments": (["first_row", *seen, "seqlen_q"] if positional else []) + ["seqlen_k"],
        "seen_arguments": [*seen, "seqlen_q", "seqlen_k"],
        "visibility": _visibility(spec),
        "visibility_arguments": ["own_key", *seen, "seqlen_k"],
        "host_features": ["window"] if spec.window else [],
    }


def _visibility(spec: Specialization) -> list[str]:
    """What hides scores of a warpgroup's keys: by key, and for all of them at once."""
    if spec.window:
        return ["from_query", "all_from", "to_query", "all_to"]
    return ["from_query", "all_from"] if spec.causal else ["exists", "all_exist"]


def _names(spec: Specialization, dq_path: str) -> dict[str, object]:
    descs = ["q_desc", "k_desc", "v_desc", "do_desc", "lse_start_desc", "neg_delta_desc"]
    descs += ["dq_acc_desc"] if dq_path in ("inline", "writer") else []
    buffers = ["q_tiles", "k_tiles", "v_tiles", "do_tiles", "lse_tiles", "delta_tiles"]
    buffers += ["p_tiles"] if resources.is_wide(spec) else ["ds_tiles"] if dq_path else []
    buffers += ["dq_tiles"] if dq_path in ("inline", "writer") else []
    return {"descs": [*descs, "dk_desc", "dv_desc"], "buffers": buffers}


def _synchronisation(spec: Specialization, config: Config, dq_path: str) -> dict[str, object]:
    """Barriers by name: slots of a group (0: it is a single one) and arrivals that complete a phase."""
    named = config["barriers"] == "named"
    slots = {"k_full": (0, 1), "v_full": (0, 1), "q_full": ("Q_STAGES", 1), "do_full": ("DO_STAGES", 1)}
    dq_slots = {"q_full": (2, 1), "k_full": ("DQ_STAGES", 1), "v_full": ("DQ_V_STAGES", 1)}
    if not named:
        slots |= {"q_empty": ("Q_STAGES", 2), "do_empty": ("DO_STAGES", 2)}
        slots |= {"ds_full": (2, 2), "all_done": (0, 2)} if dq_path else {}
        dq_slots |= {"k_empty": ("DQ_STAGES", 2), "v_empty": ("DQ_V_STAGES", 2)}
    return {
        "named": named,
        "named_barriers": resources.named_barriers(spec, config),
        "first_barrier": FIRST_NAMED_BARRIER,
        "ring_threads": 2 * THREADS_PER_WARPGROUP + 32,
        "hand_over_threads": THREADS_PER_WARPGROUP + (32 if dq_path else THREADS_PER_WARPGROUP),
        "q_empty": "Q_EMPTY" if named else "q_empty",
        "do_empty": "DO_EMPTY" if named else "do_empty",
        "barriers": list(slots),
        "barrier_slots": slots,
        "dq_barriers": list(dq_slots),
        "dq_barrier_slots": dq_slots,
    }


def _order_text(config: Config) -> str:
    group = config.integer("heads_per_group")
    if group == 1:
        return "blocks fastest"
    return f"heads fastest, in groups of {group}, most work first"
