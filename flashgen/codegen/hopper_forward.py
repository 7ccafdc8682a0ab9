"""The Hopper forward family: FlashAttention-3's warp-specialised algorithm in Gluon, for sm90."""

from __future__ import annotations

from flashgen.codegen import head_packing
from flashgen.codegen import hopper_resources as resources
from flashgen.codegen import hopper_text as text
from flashgen.codegen.family import KernelFamily, Knob, Sizes
from flashgen.codegen.head_parts import can_split
from flashgen.codegen.hopper_favourites import MBARRIER, NAMED, SMALLER, SPLIT, WON, Changes
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.workload import Specialization

KNOBS = (
    Knob(name="warpgroups", values=(1, 2, 3, 4), meaning="consumer warpgroups of a program, each of 64 query rows"),
    Knob(name="blocks_per_sm", values=(1, 2, 3), meaning="programs side by side, between which registers are divided"),
    Knob(name="block_n", values=(64, 128), meaning="keys of a step"),
    Knob(name="v_stages", values=(2, 3), meaning="slots for blocks of V, and of K"),
    Knob(
        name="q_stages",
        values=(1, 2),
        meaning="tiles that Q has room for: with two, Q and the first keys of the next tile are there when it begins",
        default=1,
        implied=True,
    ),
    Knob(
        name="k_release",
        values=("own", "with_v"),
        meaning="a slot of K is released by a barrier of its own, or with V's by having one slot more",
    ),
    Knob(
        name="barriers",
        values=("mbarrier", "named"),
        meaning="what slots are released by and turns passed with: barriers in shared memory, or the hardware's own",
    ),
    Knob(name="ping_pong", values=(False, True), meaning="warpgroups take turns at the matrix unit"),
    Knob(
        name="conditional_rescale",
        values=(False, True),
        meaning="the maximum moves only by more than 2**8, and a warp whose maxima stay skips the rescaling",
    ),
    Knob(
        name="exp_order",
        values=("free", "barrier", "data"),
        meaning="exponentials stay ahead of the wait for the product: not, by a wait, by a release that needs them",
    ),
    Knob(name="max_tree", values=("chain", "chains"), meaning="the maximum of a row in one chain or four"),
    Knob(
        name="heads_per_group",
        values=(1, 2, 4, 8, 16, 32),
        meaning="tile order: 1 query blocks fastest, n heads fastest in groups of n, most keys first",
    ),
    Knob(
        name="masked_blocks",
        values=("one", "peeled", "branch"),
        meaning="causal: only the first block of keys has hidden ones, since query blocks are cut for it; "
        "or those that have a loop of their own; or a branch in the one loop",
    ),
    Knob(
        name="hidden_blocks",
        values=("computed", "skipped"),
        meaning="causal: a warpgroup computes the last blocks of a tile of several, of which it sees no key, or not",
        default="computed",
        implied=True,
    ),
    Knob(
        name="split_d",
        values=(False, True),
        meaning="heads in two tiles, a power of two and the rest, instead of one padded tile",
        default=False,
        implied=True,
    ),
    Knob(
        name="packed_heads",
        values=head_packing.PACKED_HEADS,
        meaning="heads of a group side by side in the rows of a warpgroup, whose keys are read once for all of them",
        default=1,
        implied=True,
    ),
)


def _why_not(spec: Specialization, device: Device) -> str | None:
    if device.arch != "sm90":
        return f"it needs sm90, not {device.arch}"
    if spec.varlen:
        return "it has no varlen"
    if spec.mods:
        return "it takes no functions of the caller"
    if resources.score_tiles(spec) and not spec.aligned_scores:
        return (
            "the copy engine needs tiles of bias and mask with strides that are multiples of 16 bytes, 1 along the keys"
        )
    if spec.page_size is not None:
        return "it reads no paged keys"
    if spec.dtype not in text.GL_DTYPES:
        return f"its matrix unit multiplies bf16 and fp16, not {spec.dtype}"
    if resources.why_not_head_dim(spec):
        return resources.why_not_head_dim(spec)
    if not spec.aligned16:
        return "the copy engine needs pointers and strides that are multiples of 16 bytes"
    if _why_too_large(spec, _smallest(spec, device), device):
        return "its tiles of bias and mask do not fit beside heads of this size"
    return None


def _why_invalid(spec: Specialization, config: Config, device: Device) -> str | None:
    return (
        _why_meaningless(spec, config)
        or _why_not_packed(spec, config)
        or _why_impossible_mask(spec, config)
        or _why_too_large(spec, config, device)
        or _why_pointless(spec, config, device)
    )


def _why_too_large(spec: Specialization, config: Config, device: Device) -> str | None:
    needed, available = resources.live_registers(spec, config), resources.consumer_registers(config, device)
    if needed > available:
        return f"a consumer thread needs about {needed} registers and gets {available}"
    own_o = resources.own_o(spec, config, device)
    if resources.q_stages(config) > 1 and not own_o:
        return "two tiles of Q leave no place for the output"
    shared, limit = resources.smem_bytes(spec, config, own_o=own_o), resources.smem_available(config, device)
    if shared > limit:
        return f"it needs {shared} bytes of shared memory and a block has {limit}"
    barriers, left = resources.named_barriers(spec, config), resources.NAMED_BARRIERS - resources.FIRST_NAMED_BARRIER
    if barriers > left:
        return f"it needs {barriers} named barriers and Triton leaves {left}"
    return None


def _why_meaningless(spec: Specialization, config: Config) -> str | None:
    if resources.is_split(config) and not (can_split(spec.head_dim) or can_split(spec.head_dim_v)):
        return f"heads of {spec.head_dim} and {spec.head_dim_v} columns are no smaller in two parts"
    if config["ping_pong"] and config["warpgroups"] == 1:
        return "one warpgroup has nobody to take turns with"
    if spec.causal and config["heads_per_group"] == 1:
        return "tiles with the most keys start first, and only groups of heads have an order for that"
    if not spec.causal and config["heads_per_group"] != 1:
        return "without a causal mask all tiles are equally heavy"
    if config["hidden_blocks"] == "skipped" and not _hides_whole_blocks(spec, config):
        return "every warpgroup sees keys of every block that its tile sees"
    if config["exp_order"] == "data" and (config["barriers"], config["k_release"]) != ("named", "own"):
        return "the release that needs the exponentials is that of K, by a named barrier"
    return None


def _hides_whole_blocks(spec: Specialization, config: Config) -> bool:
    """Whether the first warpgroup may see no key of a tile's last block, and the kernel can start without it."""
    return (
        spec.causal
        and config["masked_blocks"] == "branch"
        and resources.block_m(config) - resources.ROWS >= resources.packed_heads(config) * config.integer("block_n")
        and not resources.score_tiles(spec)
    )


def _why_not_packed(spec: Specialization, config: Config) -> str | None:
    if resources.packed_heads(config) > 1 and (spec.bias or spec.mask):
        return "heads side by side may have different biases or masks, and a step loads those of one"
    return None


def _why_impossible_mask(spec: Specialization, config: Config) -> str | None:
    kind = config["masked_blocks"]
    if spec.window:
        return (
            None if kind == "branch" else "a window hides keys at both ends, in blocks that only a branch tells apart"
        )
    if not spec.causal:
        return None if kind == "one" else "without a causal mask only the first block of a tile may need a mask"
    if resources.packed_heads(config) > 1:
        return None if kind == "branch" else "few query positions of packed heads are not cut along the diagonal"
    one = resources.block_m(config) <= config.integer("block_n") and not spec.offset_tensor
    if kind == "one" and not one:
        return (
            "one block of keys holds the diagonal where it has as many keys as the tile has rows, at one known offset"
        )
    if kind == "peeled" and (one or config.integer("warpgroups") > 2):
        return "a second loop for masked blocks only pays where more than one is masked, and where registers are left"
    return None


def _why_pointless(spec: Specialization, config: Config, device: Device) -> str | None:
    """What was never the fastest on an H200: a search does not spend its time on it."""
    named = config["barriers"] == "named"
    if config["exp_order"] == "barrier" and (named or not config["conditional_rescale"]):
        return "a wait for their sake only pays together with the conditional rescale, and data does it where it can"
    if config["max_tree"] == "chains" and named:
        return "four chains of maxima are slower than one where little else waits"
    if (config["warpgroups"] == 1) != (config.integer("blocks_per_sm") > 1):
        return "blocks side by side are for those of one warpgroup, which leave the matrix unit idle during a softmax"
    if config["k_release"] == "with_v" and (config["warpgroups"], config["v_stages"]) != (4, 3):
        return "releasing K with V only pays in a long ring that four warpgroups release"
    if (
        config["block_n"] == 64
        and not spec.window
        and not resources.score_tiles(spec)  # smaller tiles of them leave registers, and the output a place of its own
        and _why_too_large(spec, config.replace(block_n=128, v_stages=2), device) is None
    ):
        return "steps of 128 keys fit, and have half as many waits"
    return None


def _choices(spec: Specialization) -> dict[str, tuple[KnobValue, ...]]:
    found: dict[str, tuple[KnobValue, ...]] = {"packed_heads": (1,)}
    if not (can_split(spec.head_dim) or can_split(spec.head_dim_v)):
        found["split_d"] = (False,)
    if not spec.causal:
        found |= {"heads_per_group": (1,), "hidden_blocks": ("computed",)}
    if spec.window or not spec.causal:
        found["masked_blocks"] = ("branch",) if spec.window else ("one",)
    return found


# by (larger padded head_dim, causal): the winner of long sequences on an H200
_DEFAULTS: dict[tuple[int, bool], Changes] = {
    (64, False): {"warpgroups": 3, "v_stages": 3, "ping_pong": True},
    (64, True): {
        "warpgroups": 3,
        "v_stages": 3,
        "heads_per_group": 8,
        "ping_pong": True,
        "conditional_rescale": True,
        "q_stages": 2,
        "hidden_blocks": "skipped",
        **MBARRIER,
    },
    (128, False): NAMED,
    (128, True): {"heads_per_group": 4, **NAMED},
    (256, False): {"block_n": 64, **NAMED},
    (256, True): {"block_n": 64, "heads_per_group": 8, **NAMED},
}


USUAL: Changes = {
    "warpgroups": 2,
    "blocks_per_sm": 1,
    "block_n": 128,
    "v_stages": 2,
    "k_release": "own",
    "barriers": "mbarrier",
    "ping_pong": False,
    "conditional_rescale": False,
    "exp_order": "free",
    "max_tree": "chain",
    "heads_per_group": 1,
    "masked_blocks": "one",
    "split_d": False,
    "q_stages": 1,
    "hidden_blocks": "computed",
    "packed_heads": 1,
}


def _default(spec: Specialization, device: Device) -> Config:
    width = _width(spec)
    config = Config.of(text.FAMILY_ID, {**USUAL, **_DEFAULTS[width, spec.causal]})
    if width == 64 and spec.window:
        # the windows of such models are as short as a block
        config = config.replace(warpgroups=2, block_n=64, **NAMED)
    if spec.softcap:
        # three times as many exponentials must not wait for the product
        config = config.replace(**NAMED)
    if resources.live_registers(spec, config) > resources.consumer_registers(config, device):
        config = config.replace(warpgroups=2, **NAMED)
    config = _in_parts(spec, config, device)
    changes: tuple[Changes, ...] = ({}, {"v_stages": 2}, {"warpgroups": 2, "v_stages": 2, **NAMED})
    smaller = (_tidy(spec, config.replace(**change), device) for change in changes)
    return next((each for each in smaller if _why_too_large(spec, each, device) is None), _smallest(spec, device))


def _in_parts(spec: Specialization, config: Config, device: Device) -> Config:
    """`config` with heads in two parts where that is less, and steps of 128 keys where there is room then."""
    if _width(spec) == resources.LEAST_COLUMNS or not (can_split(spec.head_dim) or can_split(spec.head_dim_v)):
        return config
    parts = config.replace(split_d=True)
    wide = parts.replace(block_n=128, v_stages=2)
    return wide if _why_too_large(spec, wide, device) is None else parts


def _smallest(spec: Specialization, device: Device) -> Config:
    """What takes the least registers and shared memory for a warpgroup's rows, of what is not pointless."""
    changes: Changes = {"block_n": 64, "heads_per_group": 8 if spec.causal else 1, **NAMED}
    config = Config.of(text.FAMILY_ID, {**USUAL, **changes})
    config = config.replace(split_d=can_split(spec.head_dim) or can_split(spec.head_dim_v))
    return _tidy(spec, config, device)


def _favourites(spec: Specialization, device: Device) -> tuple[Config, ...]:
    default = _default(spec, device)
    found = [default.replace(**changes) for changes in WON[_width(spec), spec.causal]]
    if resources.score_tiles(spec):
        found += [config.replace(**change) for config in (default, found[0]) for change in SMALLER]
    if can_split(spec.head_dim) or can_split(spec.head_dim_v):
        found += [config.replace(**change) for config in (default, found[0]) for change in SPLIT]
    others = (config for config in dict.fromkeys(_tidy(spec, each, device) for each in found) if config != default)
    return tuple(config for config in others if _why_invalid(spec, config, device) is None)


def _tidy(spec: Specialization, config: Config, device: Device) -> Config:
    """`config` without what its tiles leave no sense or no room for: a kind of masked blocks, a second place for Q."""
    if _why_impossible_mask(spec, config) is not None:
        config = config.replace(masked_blocks="branch")
    if not _hides_whole_blocks(spec, config):
        config = config.replace(hidden_blocks="computed")
    if resources.q_stages(config) > 1 and _why_too_large(spec, config, device) is not None:
        config = config.replace(q_stages=1)
    return config


def _fitted(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> Config:
    """`config` with so many heads in a tile as the query length and the group ask for."""
    heads = head_packing.packing(sizes, resources.block_m(config))
    if heads == resources.packed_heads(config):
        return config
    found = _tidy(spec, config.replace(packed_heads=heads), device)
    return found if _why_invalid(spec, found, device) is None else config


def _why_unfit(config: Config, sizes: Sizes) -> str | None:
    return head_packing.why_unfit(sizes, resources.block_m(config), resources.packed_heads(config))


def _width(spec: Specialization) -> int:
    return max(resources.block(spec.head_dim), resources.block(spec.head_dim_v))


HOPPER_FORWARD = KernelFamily(
    id=text.FAMILY_ID,
    title="Warp-specialised FlashAttention for Hopper in Gluon",
    template="hopper_forward.py.jinja",
    direction="forward",
    knobs=KNOBS,
    why_not=_why_not,
    why_invalid=_why_invalid,
    default=_default,
    values=text.values,
    kernels=text.kernels,
    favourites=_favourites,
    choices=_choices,
    fitted=_fitted,
    why_unfit=_why_unfit,
    tolerated_spills=resources.TOLERATED_SPILLS,
)
