"""What the template of the Hopper forward family needs, and the parameters of its kernel."""

from __future__ import annotations

from flashgen.codegen import head_packing
from flashgen.codegen.common_mods import has_blocks, mod_parameters
from flashgen.codegen.common_order import ALL_HEADS, follows_lengths
from flashgen.codegen.common_scores import score_parameters
from flashgen.codegen.common_sequences import (
    SEQUENCE_FLAGS,
    SEQUENCE_POINTERS,
    SEQUENCE_SIZES,
    sequence_parameters,
    table_strides,
)
from flashgen.codegen.common_softcap import HARDWARE, tanh
from flashgen.codegen.common_types import GL_DTYPES, TORCH_DTYPES
from flashgen.codegen.common_wgmma import (
    FIRST_NAMED_BARRIER,
    NUM_SMS,
    ROWS,
    SM90,
    THREADS_PER_WARPGROUP,
    descriptor_type,
)
from flashgen.codegen.family import CompileOptions, KernelSpec, Parameter, Sizes
from flashgen.codegen.head_parts import HeadPart, part_names
from flashgen.codegen.hopper_forward import resources
from flashgen.codegen.hopper_forward import scores as hopper_scores
from flashgen.codegen.key_splits import KEY_SPLITS, merge_kernel, merge_values, share_parameters, split_keys
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import ConfigError
from flashgen.core.workload import Specialization

FAMILY_ID = "hopper_forward"

OUTPUT_STRIDES = ("stride_ob", "stride_oh", "stride_os")


def values(spec: Specialization, config: Config) -> dict[str, object]:
    """The values of the template for one kernel, by name: every knob, and what follows from the knobs and the call.

    Raises:
        ConfigError: references stay at the maximum of the first keys, and no softcap bounds the sums.
    """
    capped = resources.softmax_reference(config) == "first_block"
    if capped and not resources.is_capped(spec):
        # valid in records of earlier versions: a look-up passes them over, and nothing else may take their text either
        raise ConfigError(f"softmax_reference=first_block is for bf16 scores that a softcap bounds, got {spec.key}")
    # an output that shares leave in device memory has no place in shared memory at all
    shared_keys = split_keys(config)
    separate_o_smem = shared_keys or resources.separate_o_smem(spec, config, SM90)
    aligned = is_aligned(spec, config)
    settles = resources.softmax_reference(config) == "row_sums"
    few_keys_headroom = resources.FEW_KEYS_HEADROOM_BITS[spec.dtype]
    barriers, hardware_tanh = _barriers(spec, config), tanh(config) == HARDWARE
    d_parts, v_parts = resources.parts(spec.head_dim, config), resources.parts(spec.head_dim_v, config)
    return {
        **dict(config.knobs),
        "head_dim": spec.head_dim,
        "head_dim_v": spec.head_dim_v,
        "d_parts": d_parts,
        "v_parts": v_parts,
        # names of the tiles of Q, of the accumulators, and of the descriptors and places in shared memory of Q
        "q_names": part_names("q", d_parts),
        "acc_names": part_names("acc", v_parts),
        # query rows of a warpgroup, and query positions of a tile, which are fewer where heads are packed
        "rows": ROWS,
        "q_stages": resources.q_stages(config),
        "block_m": resources.positions(config),
        "packed_heads": resources.packed_heads(config),
        "q_descs": [f"q{part.descriptor_suffix}_desc" for part in d_parts],
        "q_places": [f"q{part.suffix}_tiles" for part in d_parts],
        "k_stages": resources.k_stages(config),
        "maxnreg": resources.maxnreg(config, SM90),
        "consumer_registers": resources.consumer_registers(config, SM90),
        "producer_registers": resources.producer_registers(config),
        "dtype": spec.dtype,
        "gl_dtype": GL_DTYPES[spec.dtype],
        "torch_dtype": TORCH_DTYPES[spec.dtype],
        # whether the output has shared memory of its own, or takes the place of Q
        "separate_o_smem": separate_o_smem,
        "softmax_reference": resources.softmax_reference(config),
        "qk_prefetch": resources.qk_prefetch(config),
        # whether sums may overflow a reference that does not follow the maximum, or hold NaN of hidden rows of V
        "may_recompute": resources.may_recompute(spec, config),
        # exponents of two: how far the reference is above the first maximum, how far a softcap lets scores lie apart at
        # most; `capped`: references stay at the first maximum, because of a softcap
        "headroom": resources.SETTLING_HEADROOM_BITS[spec.dtype] if settles else resources.CAPPED_HEADROOM_BITS,
        "capped": capped,
        "largest_scale": resources.CAPPED_BITS // (2 if hardware_tanh else 1),
        # whether the GPU's own instruction computes the tanh of a softcap
        "hardware_tanh": hardware_tanh,
        # whether references follow the row sums; then: whether by what a step adds to them, to which exponent of two
        # below 0 that is brought back, the keys of a row up to which its reference has more headroom, the pieces that a
        # step is cut into
        "settles": settles,
        "by_step": settles and spec.dtype == "fp16",
        "settled": resources.SETTLED_BITS[spec.dtype],
        "settled_bits": resources.fp32_bits(resources.SETTLED_BITS[spec.dtype]),
        "factor_bits": resources.fp32_bits(resources.FACTOR_BITS),
        "settles_fully_bits": resources.fp32_bits(resources.FACTOR_BITS - resources.SETTLED_BITS[spec.dtype]),
        "few_keys": resources.FEW_KEYS if few_keys_headroom and settles and (spec.causal or spec.window) else 0,
        "few_keys_headroom": few_keys_headroom,
        # how many keys a row has seen before its maximum is no longer followed
        "followed_keys": resources.FOLLOWED_KEYS[spec.dtype] if settles else 1,
        **_pieces(v_parts, config),
        "o_places": [
            f"{'o' if separate_o_smem else 'q'}{part.suffix}_tiles"
            for part in (v_parts if separate_o_smem else d_parts)
        ],
        # what roles are handed together: tensor descriptors, tiles in shared memory, barriers, what the output needs
        "descs": [parameter.name for parameter in _descriptors(spec, config)],
        "buffers": _buffers(spec, config, separate_o_smem=separate_o_smem and not shared_keys),
        # whether slots are released by named barriers; numbers and threads of those
        "named": config["barriers"] == "named",
        "first_barrier": FIRST_NAMED_BARRIER,
        "ring_threads": resources.ring_threads(config),
        "slot_threads": THREADS_PER_WARPGROUP + 32,
        "barriers": list(barriers),
        "barrier_kinds": barriers,
        "outputs": _outputs(spec, config),
        **_shares(spec, config),
        **hopper_scores.values(spec, aligned=aligned, shared_keys=shared_keys),
        "turns_back": _turns_back(spec, config),
        "num_sms": NUM_SMS,
        "schedule_arguments": _schedule_arguments(config, aligned=aligned),
        **_sequences(spec, config),
        "paged": bool(spec.page_size),
        "page_size": spec.page_size or 0,
        "page_box": resources.page_box(spec, config.integer("block_n")),
        # whether the last tile of a sequence may have no row for a warpgroup
        "passes_over": spec.varlen and config.integer("warpgroups") > 1,
    }


def _turns_back(spec: Specialization, config: Config) -> bool:
    """Whether CTAs that share an SM have tiles of different lengths where a launch has no more tiles than CTAs.

    All heads are one group there, so that tiles lie in the order of their lengths.
    """
    one_group = config.integer("heads_per_group") >= ALL_HEADS and follows_lengths(spec)
    return one_group and config.integer("blocks_per_sm") > 1 and not split_keys(config)


def _outputs(spec: Specialization, config: Config) -> list[str]:
    """What the output of a tile goes to, beside descriptors."""
    if split_keys(config):
        found = ["OParts", "LseParts"]
    else:
        found = ["LSE", "lse_rows", *(["O", *OUTPUT_STRIDES] if _stores_rows(spec, config) else [])]
    return [*found, *(["total_q"] if spec.varlen else [])]


def _stores_rows(spec: Specialization, config: Config) -> bool:
    """Whether a tile may be stored by pointers: one that begins before the first row, or with heads of two groups."""
    if split_keys(config):
        return False
    return is_aligned(spec, config) or (spec.varlen and resources.packed_heads(config) > 1)


def _shares(spec: Specialization, config: Config) -> dict[str, object]:
    """Whether CTAs share the keys of a tile, and what the kernel that merges them needs."""
    return {
        "split_keys": split_keys(config),
        "ranged": (spec.window or spec.mask == "keys" or split_keys(config)) and not has_blocks(spec),
        **merge_values(spec, spec.dtype),
    }


def _sequences(spec: Specialization, config: Config) -> dict[str, object]:
    """What roles are told of packed sequences: their lengths, where a tile lies, and what of it loads depend on."""
    keys = ["seqlen_k"] if spec.page_size else ["k_start", "seqlen_k"]
    heads = ["h"] if resources.packed_heads(config) == 1 else ["h_k", "first_head"]
    place = ["tile_row", *heads, "b", "q_start", "q_rows", "seqlen_q", *keys] if spec.varlen else []
    loads = ["tile_row", *heads, *(["b"] if spec.page_size else []), "q_start", "seqlen_q", *keys]
    lengths = [*SEQUENCE_POINTERS, *SEQUENCE_FLAGS, *_sequence_sizes(spec)]
    return {"varlen": spec.varlen, "lengths": lengths, "place": place, "loaded_from": loads}


def _sequence_sizes(spec: Specialization) -> tuple[str, ...]:
    """Sequences and rows of all of them; of keys in pages how many a row of the block table has pages for."""
    return (*SEQUENCE_SIZES[:-1], "table_keys") if spec.page_size else SEQUENCE_SIZES


def _pieces(v_parts: tuple[HeadPart, ...], config: Config) -> dict[str, object]:
    """Columns of a piece, and names of the pieces of each accumulator and of the weights: all have one shape.

    What settles early is no accumulator but a factor for all of them, a value for each row and thread.
    """
    block_n = config.integer("block_n")
    if resources.early_settle(config):
        return {"early_settle": True, "piece": block_n, "acc_pieces": [["alpha"]], "weight_pieces": ["w"]}
    piece = min(block_n, *(part.block for part in v_parts))
    accs = [[f"a{part.suffix or 0}_{i}" for i in range(part.block // piece)] for part in v_parts]
    weights = [f"w_{i}" for i in range(block_n // piece)]
    return {"early_settle": False, "piece": piece, "acc_pieces": accs, "weight_pieces": weights}


def is_aligned(spec: Specialization, config: Config) -> bool:
    """Whether query blocks are cut along the diagonal; the first of a head may then begin before the first row."""
    return spec.causal and config["masked_blocks"] == "one"


def _schedule_arguments(config: Config, *, aligned: bool) -> list[str]:
    """What tells the first row, batch and heads of a tile."""
    group = ["group_size"] if resources.packed_heads(config) > 1 else []
    splits = ["key_splits"] if split_keys(config) else []
    return ["tile", "tiles", *splits, "nheads", *group, "seqlen_q", *(["q_offset"] if aligned else [])]


def _buffers(spec: Specialization, config: Config, *, separate_o_smem: bool) -> list[str]:
    """Names of the tiles in shared memory, in the order in which roles unpack them."""
    dims = {"q": spec.head_dim, "k": spec.head_dim, "v": spec.head_dim_v} | (
        {"o": spec.head_dim_v} if separate_o_smem else {}
    )
    found = [f"{name}{part.suffix}_tiles" for name, size in dims.items() for part in resources.parts(size, config)]
    found += [f"{name}_tiles" for name in resources.score_tiles(spec)]
    return [*found, *(["overflow_flags"] if resources.may_recompute(spec, config) else []), "next_tiles"]


def _barriers(spec: Specialization, config: Config) -> dict[str, tuple[str, bool]]:
    """The barriers in shared memory by name: what has a slot each, and whether all warpgroups complete a phase.

    A slot is one of a ring (q, k, v), of a warpgroup, or of one of two tiles.
    """
    in_memory = config["barriers"] == "mbarrier"
    found = {"q_full": ("q", False), "k_full": ("k", False), "v_full": ("v", False)}
    found |= {"v_empty": ("v", True)} if in_memory else {}
    found |= {"k_empty": ("k", True)} if in_memory and config["k_release"] == "own" else {}
    found |= {"turn": ("warpgroup", False)} if in_memory and config["ping_pong"] else {}
    if resources.score_tiles(spec):
        found["score_full"] = ("warpgroup", False)
        found |= {"score_empty": ("warpgroup", False)} if in_memory else {}
    found |= {"q_empty": ("q", False), "tile_full": ("tile", False), "tile_empty": ("tile", True)}
    return found | ({"overflow_ready": ("tile", True)} if resources.may_recompute(spec, config) else {})


def _parameters(spec: Specialization, config: Config) -> tuple[Parameter, ...]:
    """What a launch binds.

    On hardware these become what those of a Triton kernel become: a descriptor is its CUtensorMap, shape and strides,
    and two null pointers end the list. Of Triton's metadata, `tensordesc_meta` has an entry for each descriptor, whose
    `block_size` ends with one line of the swizzle (64 elements), and `num_warps` counts all roles: the block of a
    launch is 32 * num_warps threads, 128 for each warpgroup and as many for the producer.
    """
    found, shared = _descriptors(spec, config), split_keys(config)
    by_rows = _stores_rows(spec, config)
    found += [Parameter(name="O", type=f"*{spec.dtype}", aligned16=True)] if by_rows else []
    found += share_parameters(wide=False) if shared else [Parameter(name="LSE", type="*fp32")]
    found.append(Parameter(name="Counter", type="*i32"))
    found += [*score_parameters(spec), *mod_parameters(spec)]
    found += sequence_parameters(spec)
    lengths = _sequence_sizes(spec) if spec.varlen else ("seqlen_q", "seqlen_k")
    last = KEY_SPLITS.name if shared else "lse_rows"
    names = (*(() if spec.varlen else ("batch",)), "nheads", "group_size", *lengths, last)
    found += [Parameter(name=name, type="i32") for name in names]
    outputs = (Parameter(name=name, type="i64") for name in (OUTPUT_STRIDES if by_rows else ()))
    return (*found, *outputs, *table_strides(spec))


def _descriptors(spec: Specialization, config: Config) -> list[Parameter]:
    block_n = config.integer("block_n")
    packed = resources.packed_heads(config)
    query_rows: tuple[int, ...] = (ROWS,) if packed == 1 else (packed, ROWS // packed)
    key_rows: tuple[int, ...] = (resources.page_box(spec, block_n),)
    if spec.varlen and packed == 1:
        # one axis more says where a sequence ends; that of heads is as long as a pack
        query_rows = (1, *query_rows)
    if spec.varlen and not spec.page_size:
        key_rows = (1, *key_rows)
    boxes = {
        "q": (query_rows, spec.head_dim),
        "k": (key_rows, spec.head_dim),
        "v": (key_rows, spec.head_dim_v),
        "o": (query_rows, spec.head_dim_v),
    }
    if split_keys(config):
        del boxes["o"]
    found = [
        Parameter(name=f"{tensor}{part.descriptor_suffix}_desc", type=descriptor_type(spec.dtype, *rows, part.block))
        for tensor, (rows, head_dim) in boxes.items()
        for part in resources.parts(head_dim, config)
    ]
    tiles = resources.score_tiles(spec).items()
    return found + [Parameter(name=f"{name}_desc", type=descriptor_type(dtype, ROWS, block_n)) for name, dtype in tiles]


def _options(config: Config) -> CompileOptions:
    return CompileOptions(num_warps=4, num_stages=1, maxnreg=resources.maxnreg(config, SM90))


def kernels(spec: Specialization, config: Config) -> tuple[KernelSpec, ...]:
    """The kernel of a config, with the programs of a launch: no more than tiles, nor than run side by side.

    And the one that merges what CTAs that share the keys of a tile come to.
    """
    rows, packed_heads, aligned = (
        resources.tile_rows(config),
        resources.packed_heads(config),
        is_aligned(spec, config),
    )
    side_by_side = config.integer("blocks_per_sm")

    varlen, tile = spec.varlen, rows // packed_heads
    # the first block of a head begins up to a block before its first row, which takes one block more
    before = rows - 1 if aligned else 0

    def programs(device: Device, sizes: Sizes) -> int:
        if varlen:
            tiles = head_packing.tiles_of_sequences(sizes, rows, packed_heads)
        else:
            tiles = head_packing.packs(sizes, packed_heads) * -(-(sizes.seqlen_q + before) // tile)
        return min(tiles * sizes.key_splits, device.num_sms * side_by_side)

    parameters, options = _parameters(spec, config), _options(config)
    main = KernelSpec(entry=FAMILY_ID, parameters=parameters, options=options, programs=programs, language="gluon")
    return (main, merge_kernel(spec, FAMILY_ID, spec.dtype)) if split_keys(config) else (main,)
