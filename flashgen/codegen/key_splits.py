"""Shares of the keys of a tile in a forward pass: the knob `split_keys`.

A tile of queries of one head is a CTA, which walks over all keys. One head of 1557 queries is 13 tiles, a chunk of 64
queries of 8 heads over a cache of 32768 keys is 8, and a GPU has 132 SMs. With `split_keys` several CTAs share the keys
of a tile, each leaves its output in fp32 and its LSE, and another kernel merges them (flash-decoding's scheme, Dao et
al. 2023). How many there are is a number of the launch: the kernels are the same for all.
"""

from __future__ import annotations

import functools

from flashgen.codegen import head_packing
from flashgen.codegen.common_sequences import of_class
from flashgen.codegen.family import CompileOptions, KernelSpec, Knob, Parameter, Scratch, Sizes
from flashgen.codegen.head_parts import power_of_two
from flashgen.core.alignment import ALIGNMENT_BYTES
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import DTYPE_BYTES, Specialization

SPLIT_KEYS = Knob(
    name="split_keys",
    values=(False, True),
    meaning="CTAs share the keys of a tile, as many as the sizes ask for, and a kernel more merges their outputs",
    default=False,
    implied=True,
)

SPLITS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""CTAs that may share the keys of a tile: those that were raced."""

MERGE_ROWS = 8
"""Query rows of a program of the kernel that merges shares."""

CTA_BLOCKS = 3.0
"""Blocks of keys in whose time a CTA begins and ends."""

MERGE_US = 3.0
"""Microseconds of another kernel, beside what it reads."""

SHARE_US, SHARE_ELEMENTS = 6.0, 128 * 128
"""Microseconds in which shares of so many elements go to memory and come back, one on each SM."""

COARSE = 0.2
"""What SMs idle at the end under a causal mask, in CTAs of the mean SM: the last ones end at different times."""

ALIKE = 0.9
"""Tiles that see as much of the longest one's keys in the mean end together, in waves."""

HOST_US = 4.0
"""Microseconds that shares have to gain: the host launches one kernel more and allocates what they leave."""


def best_splits(
    spec: Specialization,
    sizes: Sizes,
    device: Device,
    *,
    rows: int,
    block_n: int,
    block_us: float,
    per_sm: int,
    packed_heads: int = 1,
) -> int:
    """The number of CTAs that share the keys of a tile; 1 where none gains what the host takes for it.

    On 42 shapes on an H100 the number that is chosen took 1.005 times as long as the best one in the mean, and 1.11 at
    most (docs/decisions/shares-of-keys.md). What depends on the device cancels as far as it is faster or slower in
    everything. Of packed sequences sizes are those of a class, as the config is: bits of a sequence follow from both.
    Of sizes that say nothing of sequences, which a config is fitted to first, every tile has all keys.

    A new length asks this, so it is written out: a tenth of the time in objects.

    Args:
        spec: what is compiled in.
        sizes: of the call.
        device: what it runs on.
        rows: query rows of a tile.
        block_n: keys of a step.
        block_us: microseconds of one on an H100.
        per_sm: CTAs side by side on an SM.
        packed_heads: heads side by side in the rows of a tile.
    """
    if spec.varlen:
        if not sizes.sequences:
            return 1
        sizes = of_class(sizes)
        queries, keys = sizes.max_seqlen_q, sizes.max_seqlen_k
        tiles = head_packing.tiles_of_sequences(sizes, rows, packed_heads)
    else:
        queries, keys = sizes.seqlen_q, sizes.seqlen_k
        tiles = head_packing.tiles(sizes, rows, packed_heads)
    sm_count = device.num_sms
    slots = sm_count * per_sm
    longest = -(-keys // block_n)
    if tiles >= slots or longest * block_us <= MERGE_US + HOST_US or not tiles:
        return 1
    # blocks of keys that a tile sees in the mean: tiles that see about as many end together, in waves
    mean = longest * (1 - min(queries, keys) / keys / 2) if spec.causal else float(longest)
    in_waves = mean > ALIKE * longest
    share_us = SHARE_US * rows * spec.head_dim_v / SHARE_ELEMENTS * tiles / sm_count
    best, least = 1, (longest + CTA_BLOCKS) * block_us - HOST_US
    for splits in SPLITS:
        if splits > longest:
            break
        ctas = tiles * splits
        walked = -(-longest // splits) + CTA_BLOCKS
        if in_waves:
            walked *= -(-ctas // slots)
        elif ctas > slots:
            walked = max(walked, (mean / splits + CTA_BLOCKS) * (ctas / slots + COARSE))
        time = walked * block_us + MERGE_US + share_us * splits
        if time < least:
            best, least = splits, time
    return best


def split_keys(config: Config) -> bool:
    """Whether CTAs share the keys of a tile; not in a config that is older than the knob."""
    return bool(config.get("split_keys", False))


def with_shares(config: Config, shared: bool) -> Config:
    """A config with shared keys or without."""
    return config if shared == split_keys(config) else _other(config, shared)


@functools.lru_cache(maxsize=256)  # a new length asks for it
def _other(config: Config, shared: bool) -> Config:
    return config.replace(split_keys=shared)


def why_not_shared(spec: Specialization) -> str | None:
    """Why the keys of a tile cannot be shared, or None."""
    if spec.bias or spec.mask:
        return "with a bias or a mask a CTA has all keys of a tile"
    if spec.mods or spec.dropout:
        return "with functions of its caller or dropout a CTA has all keys of a tile"
    if spec.window:
        return "a window leaves a tile few keys, and sizes do not say how few"
    return None


def scratch_of_shares(spec: Specialization, config: Config, sizes: Sizes) -> tuple[Scratch, ...]:
    """The output and the LSE of each share of each row, for the kernel that merges them; nothing without shares."""
    if not split_keys(config):
        return ()
    rows = sizes.batch * sizes.nheads * sizes.key_splits * sizes.seqlen_q
    return Scratch(name="o_parts", shape=(rows, spec.head_dim_v)), Scratch(name="lse_parts", shape=(rows,))


def share_parameters(*, wide: bool) -> list[Parameter]:
    """Where shares leave what they came to; `wide`: rows are read or written 16 bytes at a time."""
    return [Parameter(name="OParts", type="*fp32", aligned16=wide), Parameter(name="LseParts", type="*fp32")]


def merge_values(spec: Specialization, dtype: str) -> dict[str, object]:
    """What the template of the kernel that merges shares needs, for an output of `dtype`."""
    return {
        "merge_rows": MERGE_ROWS,
        "most_splits": SPLITS[-1],
        "merge_columns": power_of_two(spec.head_dim_v),
        "merge_multiple": ALIGNMENT_BYTES // DTYPE_BYTES[dtype] if spec.aligned16 else 1,
    }


KEY_SPLITS = Parameter(name="key_splits", type="i32")


def merge_kernel(spec: Specialization, family_id: str, dtype: str) -> KernelSpec:
    """The kernel that merges the shares of each row, whose output is of `dtype`."""
    axes, sizes_of_rows = ("hs", ("total_q",)) if spec.varlen else ("bhs", ("nheads", "seqlen_q"))
    parameters = [
        *share_parameters(wide=True),
        Parameter(name="O", type=f"*{dtype}", aligned16=spec.aligned16),
        Parameter(name="LSE", type="*fp32"),
        *(Parameter(name=f"stride_o{axis}", type="i64") for axis in axes),
        *(Parameter(name=name, type="i32") for name in sizes_of_rows),
        KEY_SPLITS,
        Parameter(name="lse_rows", type="i32"),
    ]

    def programs(device: Device, sizes: Sizes) -> int:
        return -(-sizes.seqlen_q // MERGE_ROWS) * sizes.batch * sizes.nheads

    return KernelSpec(
        entry=f"{family_id}_merge",
        parameters=tuple(parameters),
        options=CompileOptions(num_warps=4, num_stages=1),
        programs=programs,
    )
