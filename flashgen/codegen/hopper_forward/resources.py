"""Shared memory and registers of the Hopper forward family, as arithmetic: what does not fit is not compiled."""

from __future__ import annotations

import struct

from flashgen.codegen.common_mods import hides
from flashgen.codegen.common_types import bias_dtype
from flashgen.codegen.common_wgmma import (
    BARRIER_BYTES,
    MAX_REGISTERS,
    REGISTER_STEP,
    ROWS,
    THREADS_PER_WARPGROUP,
    one_part,
)
from flashgen.codegen.head_parts import HeadPart, can_split, columns_of, head_parts, is_split
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import DTYPE_BYTES, Specialization

OTHER_REGS = 28
"""Registers of a consumer thread beside scores, weights and output: statistics, addresses, phases. A mask under a
branch may spill a few more, in that branch alone."""

FEW_OTHER_REGS = 24
"""The same where nothing is in flight during a softmax: 64 x 128 scores and 128 columns of output then fit the 160
registers of three warpgroups, with 8 to 40 bytes of spills without a mask, and 64 x 64 with 64 columns the 104 of four
programs, with up to 32."""

FUNCTION_REGS = 16
"""What the functions of a caller hold beside a score: the index of a row, places and values of what they load."""

TOLERATED_SPILLS = 384
"""Bytes of local memory of a thread. The roles divide all registers between them, and the fastest kernels leave none
unused: what spills is around the mainloop and under its branch of masked blocks
(docs/decisions/spilled-registers.md)."""

DEFAULT_SPILLS = 240
"""Of defaults of plain shapes: up to 40 under Triton 3.6, and up to this under 3.9."""

BLOCK_NS = (64, 128)
"""Keys of a step. Pages from which TMA cannot fill the smaller one cannot fill the larger one either."""

SWIZZLED_ROWS = 8
"""Rows after which the swizzle of a tile in shared memory repeats: a box may begin at any multiple of them."""

OVERFLOW_FLAG_BYTES = 512
"""Where a tile may be recomputed: the flags of a warpgroup for two tiles. Masks of single scores need as much again as
barriers for the rest, and so do functions that hide them."""

SETTLING_HEADROOM_BITS = {"bf16": 24, "fp16": 4}
"""How far above the first keys' maximum the reference of exponentials is that then follows the row sums, as an
exponent of two: scores may grow by 127 and this many bits between two steps, 104 natural units in bf16. The less, the
sooner a key that takes all weight gets an exact power of two; with more, scores of standard deviation 8 bring hardly
any row back. Weights in fp16 may be 65504 at most, and lose bits below 2**-14."""

SETTLED_BITS = {"bf16": 64, "fp16": 6}
"""To which negative exponent of two the sum of a row is brought back. With more, a row whose scores go on growing comes
back less often; with less, smaller values of V keep all their bits: at 64 those above 1e-19.
In fp16 it is what one step adds that is tested and brought back, so that the weights of many equal keys, of whom each
has little of the sum, stay normal numbers."""

FACTOR_BITS = 120
"""A row is brought back by this negative power of two at most, a normal number of fp32. Where its sum has grown by more
than that leaves, it is brought to 1 instead: a key that takes all weight has an exact one in either case."""

FEW_KEYS, FEW_KEYS_HEADROOM_BITS = 16, {"bf16": 60, "fp16": 0}
"""A row that sees fewer keys than this in its first block says little of its maximum, and gets more headroom; none
where the maximum is followed for longer."""

FOLLOWED_KEYS = {"bf16": 1, "fp16": 64}
"""The maximum of a row is followed until it has seen so many keys, or one block where that has more. Weights in fp16
have room for little headroom, and one key may be more than 127 bits below the next block's largest: with scores of
standard deviation 20 so many tiles under a causal mask were recomputed that it took a fifth of the time."""

CAPPED_HEADROOM_BITS = 64
"""The same under a softcap, where the reference stays, and no sum overflows."""

CAPPED_BITS = 160
"""How far apart a softcap may let two scores be for no tile to be recomputed, an exponent of two: caps up to 80 ln 2 =
55, Gemma's 50 among them. A row's first keys may be at the lower end and later ones at the upper: weights come to
2**(160 - 64) and sums of a hundred thousand of them leave V 2**14, at a cap of 50 2**30."""


def page_box(spec: Specialization, block_n: int) -> int:
    """Keys of what TMA loads at once: a block, or the page that it lies in where that is smaller."""
    return min(spec.page_size or block_n, block_n)


def why_not_pages(page_size: int | None, block_n: int) -> str | None:
    """Why TMA cannot fill blocks of `block_n` keys from pages, or None."""
    if not page_size or page_size % block_n == 0 or (block_n % page_size == 0 and page_size % SWIZZLED_ROWS == 0):
        return None
    return f"TMA fills {block_n} keys from whole pages of a multiple of {SWIZZLED_ROWS}, or from one: got {page_size}"


def parts(head_dim: int, config: Config) -> tuple[HeadPart, ...]:
    """The parts of a head: one, padded to the next power of two, or two: 96 = 64 + 32, 192 = 128 + 64."""
    if is_split(config) and can_split(head_dim):
        return head_parts(head_dim, split=True)
    return one_part(head_dim)


def columns(head_dim: int, config: Config) -> int:
    """Columns of all parts of a head together."""
    return columns_of(parts(head_dim, config))


def score_tiles(spec: Specialization) -> dict[str, str]:
    """What has a value for every query and key, and is loaded a tile at a time: its element type by its name.

    TMA brings a tile for each warpgroup and block of keys, [ROWS, block_n], into the warpgroup's own slot.
    Its warps take it to registers while the tensor cores compute the scores, and the next tile has the rest of the step
    to arrive (docs/decisions/tiles-of-scores-on-hopper.md).
    """
    found = {"bias": bias_dtype(spec)} if spec.bias == "full" else {}
    return found | ({"mask": "u8"} if spec.mask == "full" else {})


def score_bytes(spec: Specialization, config: Config) -> int:
    """Bytes of the tiles of one warpgroup and block of keys."""
    return ROWS * config.integer("block_n") * sum(DTYPE_BYTES.get(dtype, 1) for dtype in score_tiles(spec).values())


def tile_rows(config: Config) -> int:
    """Query rows of a tile: those of all consumer warpgroups."""
    return config.integer("warpgroups") * ROWS


def q_stages(config: Config) -> int:
    """Tiles that Q has room for; a config that is older than the knob means one."""
    return int(config.get("q_stages", 1))


def packed_heads(config: Config) -> int:
    """Heads that share keys in the rows of a warpgroup; a config that is older than the knob means one."""
    return int(config.get("packed_heads", 1))


def positions(config: Config) -> int:
    """Query positions of a tile, BLOCK_M in the kernel: as many as rows, but for heads side by side in them."""
    return tile_rows(config) // packed_heads(config)


def k_stages(config: Config) -> int:
    """Slots for K: one more than for V where a slot of K is released together with one of V."""
    return config.integer("v_stages") + (config["k_release"] == "with_v")


def softmax_reference(config: Config) -> str:
    """What exponentials are taken against; a config that is older than the knob means the running maximum."""
    return str(config.get("softmax_reference", "running"))


def early_settle(config: Config) -> bool:
    """Whether weights and sums settle before the output does; a config that is older than the knob means together."""
    return bool(config.get("early_settle", False))


def qk_prefetch(config: Config) -> str:
    """What of a block's scores is computed beside the product of the block before; older configs mean all of it."""
    return str(config.get("qk_prefetch", "block"))


def is_capped(spec: Specialization) -> bool:
    """Whether a softcap bounds the scores that exponentials are taken of, in a dtype that has room for all of them."""
    return spec.softcap and not (spec.alibi or spec.bias or spec.mods) and spec.dtype == "bf16"


def may_recompute(spec: Specialization, config: Config) -> bool:
    """Whether sums of a tile may overflow, or be NaN of what is hidden: then it is computed a second time."""
    return hides_single(spec) or softmax_reference(config) == "row_sums"


def hides_single(spec: Specialization) -> bool:
    """Whether single scores may be hidden, by a mask for every query and key or by a function of the caller."""
    return spec.mask == "full" or hides(spec)


def successor(spec: Specialization, config: Config) -> Config:
    """`config` with references that follow the row sums where it had those of the first keys without a bound on sums.

    Records of earlier versions have such configs (docs/decisions/first-maximum.md).
    """
    unbounded = softmax_reference(config) == "first_block" and not is_capped(spec)
    return config.replace(softmax_reference="row_sums") if unbounded else config


def fp32_bits(value: float) -> str:
    """An fp32 constant as PTX writes it."""
    return f"0f{struct.unpack('>I', struct.pack('>f', value))[0]:08X}"


def named_barriers(spec: Specialization, config: Config) -> int:
    """Named barriers of a kernel: one for each slot that is released, and one for each warpgroup that takes turns."""
    if config["barriers"] != "named":
        return 0
    slots = config.integer("v_stages") + (k_stages(config) if config["k_release"] == "own" else 0)
    return slots + config.integer("warpgroups") * (bool(config["ping_pong"]) + bool(score_tiles(spec)))


def ring_threads(config: Config) -> int:
    """Threads that meet when a slot is released: all consumers and the producer's warp."""
    return config.integer("warpgroups") * THREADS_PER_WARPGROUP + 32


def producer_registers(config: Config) -> int:
    """Registers of a thread of the producer warp: what was tried on the device."""
    return 32 if config["warpgroups"] == 3 else 24


def maxnreg(config: Config, device: Device) -> int:
    """Registers of a thread at the launch: an equal share for all warps; one producer warp counts as a warpgroup."""
    threads = THREADS_PER_WARPGROUP * (config.integer("warpgroups") + 1)
    share = device.regs_per_sm // (config.integer("blocks_per_sm") * threads)
    return min(MAX_REGISTERS, share // REGISTER_STEP * REGISTER_STEP)


def consumer_registers(config: Config, device: Device) -> int:
    """Registers of a consumer thread, once the producer has given up what it does not need."""
    warpgroups = config.integer("warpgroups")
    pool = maxnreg(config, device) * (warpgroups + 1) - producer_registers(config)
    return min(MAX_REGISTERS, pool // warpgroups // REGISTER_STEP * REGISTER_STEP)


def live_registers(spec: Specialization, config: Config) -> int:
    """Registers that a consumer thread needs: fp32 scores, 16-bit weights, fp32 output, bias, mask, the rest."""
    block_n = config.integer("block_n")
    # a mask of keys is loaded in a branch, for blocks with hidden ones, and spills there what it has no room for
    by_key = block_n // 4 * (spec.bias == "keys") + block_n // 16 * (spec.mask == "keys")
    # a thread has block_n / 2 scores; the bytes of a mask come by twos, each pair in a register of its own
    tiles = block_n // 8 * sum(max(2, DTYPE_BYTES.get(dtype, 1)) for dtype in score_tiles(spec).values())
    # the weights of the block before are in use while the scores come, unless these come after
    weights = block_n // 4 if qk_prefetch(config) == "block" else 0
    other = OTHER_REGS if qk_prefetch(config) == "block" else FEW_OTHER_REGS
    functions = FUNCTION_REGS if spec.mods else 0
    return block_n // 2 + weights + by_key + tiles + functions + columns(spec.head_dim_v, config) // 2 + other


def smem_bytes(spec: Specialization, config: Config, *, separate_o_smem: bool) -> int:
    """Shared memory of a block: Q, the rings of K and V, bias, mask, and the output if `separate_o_smem`."""
    d, dv, block_n = columns(spec.head_dim, config), columns(spec.head_dim_v, config), config.integer("block_n")
    elements = tile_rows(config) * (q_stages(config) * d + (dv if separate_o_smem else 0))
    elements += block_n * (k_stages(config) * d + config.integer("v_stages") * dv)
    tiles = config.integer("warpgroups") * score_bytes(spec, config)
    barriers = BARRIER_BYTES
    if may_recompute(spec, config):
        barriers += OVERFLOW_FLAG_BYTES * config.integer("warpgroups") + (BARRIER_BYTES if hides_single(spec) else 0)
    return elements * DTYPE_BYTES[spec.dtype] + tiles + barriers


def smem_available(config: Config, device: Device) -> int:
    """Shared memory of one of the blocks that run side by side; the driver keeps a kilobyte of each."""
    return min(device.smem_per_block, device.smem_per_sm // config.integer("blocks_per_sm") - 1024)


def separate_o_smem(spec: Specialization, config: Config, device: Device) -> bool:
    """Whether the output of a tile has its own place, so that Q of the next tile is loaded meanwhile.

    Else its parts take the places of Q's parts, where those have the same shapes.
    """
    d, dv = parts(spec.head_dim, config), parts(spec.head_dim_v, config)
    if [part.block for part in dv] != [part.block for part in d[: len(dv)]]:
        return True
    return smem_bytes(spec, config, separate_o_smem=True) <= smem_available(config, device)
