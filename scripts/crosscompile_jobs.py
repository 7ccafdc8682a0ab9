"""Which kernels `scripts/crosscompile.py` compiles.

All targets are for the oldest Triton; the newest has `--few`. What a Triton no longer accepts is in the text of a
kernel far more often than in what a target makes of it: so each of the two compiles every branch of the templates that
features have, and the oldest those of plain shapes of families for wgmma, too. A test of tests/codegen/test_goldens.py
counts. Features have families for sm90 alone there, and the others for one target in turn, most for another one under
each Triton.

`make test` has a few of these with `--brief`: of each family a plain default, which may not spill, and a kernel with
many features; and functions as far as Triton's own IR, which says whether it accepts their texts. The GPU tests compile
and run every family and every feature on sm90. `make crosscompile-all` makes machine code of all, by either, as `make
test-all` and so `make release` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flashgen.codegen.families import family, fitted, invalid, unsupported, usual
from flashgen.codegen.family import KernelFamily, Sizes
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device, find_device
from flashgen.core.score_mods import ScoreMods, UserFunction
from flashgen.core.workload import DECODE as STEP
from flashgen.core.workload import Specialization

TARGETS = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120", "gfx942", "gfx1200")
FEW_TARGETS = ("sm100", "sm80", "gfx942", "sm90")
"""The targets of `--few`: one of each kind, and sm100 for its matrix products alone, of the first of SHAPES, which
compiles in a third of the time of the second one."""

Shape = tuple[str, int, bool]
"""dtype, head_dim, causal."""

Rows = Sequence[KernelFamily]

WGMMA_SHAPES: tuple[Shape, ...] = (
    ("bf16", 64, True),
    *(("bf16", 128, causal) for causal in (False, True)),
    *(("fp16", 256, causal) for causal in (False, True)),  # which differs from bf16 in conversions alone
)
"""Of a forward pass where wgmma is, for which there are families of its own. The newest Triton has the sixth."""

SHAPES: tuple[Shape, ...] = (("bf16", 64, False), ("bf16", 128, True), ("fp16", 256, True))
"""Each head_dim once, with and without a mask, in both dtypes: for sm90, and in turn for the other targets.

tests/codegen compiles every shape for every target with the Triton that the tests run with, so that every two of a
shape, a target and a Triton meet. A forward pass has the second one, with a decoding step, and one more for each other
target, under `--few` one alone. A backward pass is several kernels: each other target has one of the two families for
all targets, for one shape, and sm90 under `--few` one shape of every family. Where a forward pass has both kinds of
loads, the newest Triton and that of the tests compile both.
"""

WGMMA_ALONE = (
    *(("forward", shape) for shape in WGMMA_SHAPES if shape not in (("bf16", 128, True), ("fp16", 256, True))),
    *(("backward", shape) for shape in (("bf16", 64, False), ("bf16", 128, True))),
)
"""Those that the oldest Triton compiles by families for wgmma alone; the newest or tests/codegen have all others."""

VARIED = ("bf16", 128)
"""The dtype and the head_dim of which other loads and packed heads are compiled, too."""

FEATURES = (
    "fwd-bf16-d64-causal-sink-window",
    "fwd-bf16-d256-causal-softcap-window",
    "fwd-fp16-d64-bias",
    "fwd-bf16-d128-causal-keybias-scattered",
    "fwd-bf16-d80-alibi",
    "fwd-bf16-d64-mask",
    "fwd-fp32-d64-keymask",
    "fwd-bf16-d192-dv128-causal-alibi-varlen",
    "fwd-tf32-d128-causal",
    "fwd-fp16-d512-causal",
    "fwd-fp32-d64-softcap-offset-unaligned-dropout",
    "bwd-bf16-d80-causal-softcap-window-keymask",
    "bwd-fp16-d64-alibi-bias-dbias",
    "bwd-tf32-d64-keybias-mask-dbias-scattered-offset-dropout",
    "bwd-bf16-d64-causal-window-varlen",
    "dec-bf16-d128-page16-softcap-alibi-sink",
    "dec-bf16-d128-page16-alibi-offset",
    "fwd-bf16-d128-causal-window-page16-varlen",
    "dec-fp16-d64-page64-sink",
)
"""Specializations of features and head sizes, which open the branches of the templates that SHAPES do not.

Under either Triton families for wgmma compile each for sm90, and the others for one of the targets, in turn.
"""

BY_DESCRIPTORS = (
    "fwd-bf16-d256-causal-softcap-window",
    "fwd-bf16-d128-causal-keybias-scattered",
    "fwd-fp16-d512-causal",
    "bwd-bf16-d80-causal-softcap-keymask-window",
    "bwd-bf16-d64-causal-varlen-window",
)
"""Those of FEATURES, by their keys, that the others compile by TMA, too, where they have branches of their own.

That is for sm90, if the target whose turn it is has no TMA.
"""

ONE_WARPGROUP: dict[str, KnobValue] = {
    "warpgroups": 1,
    "blocks_per_sm": 2,
    "block_n": 64,
    "ping_pong": False,
    "exp_order": "free",
    "q_stages": 1,
    "hidden_blocks": "computed",
}
"""Knobs of families for wgmma that compile in a third of the time: every warpgroup has code of its own."""

SMALL_TILES = {"block_m": 32, "block_n": 32, "num_warps": 4, "num_stages": 2}
SMALL_TILES |= {f"dq_{name}": most for name, most in SMALL_TILES.items()}
"""The most of these knobs with which the other families compile in half the time.

Features, functions, other loads and short queries have them: a text is accepted or not, whatever the sizes of its
tiles. SHAPES have the defaults.
"""

WGMMA_TILES = {name: 64 if "block" in name else most for name, most in SMALL_TILES.items()}
"""The same for sm90 under the oldest: the smallest tiles of which it has products of its own kind, not those of sm80.

Those of sm100 take no less time in small tiles.
"""

FEW_FEATURE_TARGETS = ("sm80", "sm90", "gfx942")

FULLEST = ("gfx1200", "fwd-fp32-d128-causal")
"""A target and a specialization whose default leaves nearly no register unused, and so is the first to spill."""

SHARED = ("fwd-bf16-d192-dv128-causal-alibi-varlen", "fwd-fp16-d512-causal")
"""Those of FEATURES, by their keys, with shared keys, too."""

FUNCTIONS = ScoreMods(
    score_mod=UserFunction(
        name="score_mod", source="def score_mod(score, b, h, q, k, doc):\n    return score - tl.abs(q - k) * 0.1\n"
    ),
    mask_mod=UserFunction(
        name="mask_mod", source="def mask_mod(b, h, q, k, doc):\n    return tl.load(doc + q) == tl.load(doc + k)\n"
    ),
    aux=("i32",),
    block_mask=True,
)


FUNCTION_TARGETS = ("sm86", "sm100", "gfx1200")
"""Of the oldest Triton. The newest compiles functions for sm90, and tests/codegen for it, sm120 and gfx942.

Families for wgmma compile them under either.
"""

DECODE = Sizes(batch=8, nheads=32, nheads_k=8, seqlen_q=1, seqlen_k=4096)
STEPS = (("dec-bf16-d128-page16", 64, 1), ("dec-bf16-d128-sink", 1, 16), ("dec-bf16-d128", 16, 16))
"""What families of decoding read, how many sequences there are and their queries: programs of the first are near the
registers of an SM, the second is for warpgroups, and the third has shares whose rows are merged together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One kernel for one device."""

    spec: Specialization
    config: Config
    device: Device
    may_spill: bool  # a default config may not: it serves where nothing was tuned
    to_machine_code: bool = True  # else as far as Triton's own IR


def jobs(rows: Rows, targets: list[str]) -> list[Job]:
    """Defaults for each target, with and without a mask; functions and features for some targets."""
    found = []
    for number, device in enumerate(map(find_device, targets)):
        forward = WGMMA_SHAPES if device.has_wgmma else (SHAPES[1], SHAPES[number % 2 * 2])
        # halves of the targets, so that every shape meets both families of a backward pass
        found += with_shapes(rows, device, number // 4 + 1, forward, shapes_in_turn(device, number))
        found += with_functions(rows, device) if device.arch in FUNCTION_TARGETS else []
        found += functions_for_wgmma(rows, device) if device.has_wgmma else []
        found += with_steps(rows, device) if device.has_wgmma else []
    found += fullest(rows) if FULLEST[0] in targets else []
    found += with_features(rows, [find_device(target) for target in targets], first=0)
    return [in_small_tiles(job, WGMMA_TILES) if job.may_spill else job for job in found]


def brief(found: list[Job]) -> list[Job]:
    """The first of each family, the one with the most features, and those with functions as far as Triton's own IR.

    The first ones are plain defaults that may not spill, but for steps of decoding, which do under the newest. Features
    of backward passes for sm90 take up to ten seconds each behind the IR, and go as far, too.
    """
    plain, full = dict[str, Job](), dict[str, Job]()
    for job in found:
        name = job.config.family
        if name not in plain and (not job.may_spill or job.spec.direction == STEP):
            plain[name] = job
        elif job.spec.mods is None and features(job) > features(full.get(name)):
            full[name] = job
    functions = [job for job in found if job.spec.mods is not None]
    whole = [job for job in full.values() if job.spec.direction != "backward" or not job.device.has_wgmma]
    to_ir = [replace(job, to_machine_code=False) for job in (*full.values(), *functions) if job not in whole]
    return [*plain.values(), *whole, *to_ir]


def features(job: Job | None) -> int:
    """How many words there are in the key of a job, of which each but the first ones is a feature."""
    return 0 if job is None else len(job.spec.key.split("-"))


def few_jobs(rows: Rows) -> list[Job]:
    """A shape or more for each of FEW_TARGETS; features for one of FEW_FEATURE_TARGETS."""
    found = []
    for number, device in enumerate(map(find_device, FEW_TARGETS)):
        backward = SHAPES[1:2] if device.has_wgmma else shapes_in_turn(device, number)
        found += with_shapes(rows, device, number + 1, shapes_in_turn(device, number), backward, varied=True)
        if device.has_wgmma:
            found += [replace(job, may_spill=True) for job in with_steps(rows, device)]  # 112 bytes under Triton 3.9
    devices = [find_device(target) for target in FEW_FEATURE_TARGETS]
    found += with_functions(rows, find_device("sm90")) + functions_for_wgmma(rows, find_device("sm90"))
    found += [*fullest(rows), *with_features(rows, devices, first=1)]
    return [in_small_tiles(job, SMALL_TILES) if job.may_spill else job for job in found]


def in_small_tiles(job: Job, for_sm90: dict[str, int]) -> Job:
    """The same features with less to compile, where that is valid.

    Where sm90 keeps products of its own, pages keep two warpgroups, too: it is those that pass over hidden blocks.
    Families for wgmma without a knob for warps stay as they are, and so does what is for sm100.
    """
    if job.device.has_warpgroup_mma > job.device.has_wgmma:
        return job
    declared = {knob.name: knob for knob in family(job.config.family).knobs}
    small = ONE_WARPGROUP if declared.keys() >= ONE_WARPGROUP.keys() else {}
    if small and job.spec.page_size and for_sm90 is WGMMA_TILES:
        return job
    if not small and "num_warps" in declared:
        most = for_sm90 if job.device.has_wgmma and job.spec.dtype != "fp32" else SMALL_TILES
        least = {name: min(job.config.integer(name), size) for name, size in most.items() if name in declared}
        small = {name: value for name, value in least.items() if declared[name].allows(value)}
    config = job.config.replace(**small)
    return job if invalid(config, job.spec, job.device) else replace(job, config=config)


def fullest(rows: Rows) -> list[Job]:
    """The default that has the fewest registers to spare."""
    device, spec = find_device(FULLEST[0]), Specialization.parse(FULLEST[1])
    chosen = serving(rows, spec, device)
    return [Job(spec=spec, config=row.default(spec, device), device=device, may_spill=False) for row in chosen]


def serving(rows: Rows, spec: Specialization, device: Device) -> list[KernelFamily]:
    """Those of the families that serve `spec` on `device`."""
    return [row for row in rows if unsupported(row, spec, device) is None]


def for_wgmma(rows: Rows, spec: Specialization) -> list[KernelFamily]:
    """Those of the families that serve `spec` where wgmma is, and nowhere else."""
    return [row for row in rows if unsupported(row, spec, find_device("sm80")) is not None]


def shapes_in_turn(device: Device, number: int) -> tuple[Shape, ...]:
    """All of SHAPES where wgmma is, for which there are families of its own; else one of them, in turn."""
    return SHAPES if device.has_wgmma else (SHAPES[number % len(SHAPES)],)


def with_shapes(
    rows: Rows,
    device: Device,
    turn: int,
    forward: tuple[Shape, ...],
    backward: tuple[Shape, ...],
    *,
    varied: bool = False,
) -> list[Job]:
    """Defaults of shapes; what fits a decoding step, and `varied` loads of both kinds, where these differ."""
    found = []
    for spec in specializations({"forward": forward, "backward": backward}):
        chosen = serving(rows, spec, device)
        if (
            not varied
            and device.has_wgmma
            and (spec.direction, (spec.dtype, spec.head_dim, spec.causal)) in WGMMA_ALONE
        ):
            chosen = for_wgmma(chosen, spec)
        if spec.direction == "backward" and not device.has_wgmma and chosen:
            chosen = chosen[turn % len(chosen) :][:1]
        for row in chosen:
            config = row.default(spec, device)
            found.append(Job(spec=spec, config=config, device=device, may_spill=False))
            other = other_loads(config, spec, device) if varied and spec.direction == "forward" else []
            other += for_short_queries(config, spec, device)
            found += [Job(spec=spec, config=each, device=device, may_spill=True) for each in other]
    return found


def with_features(rows: Rows, devices: list[Device], *, first: int) -> list[Job]:
    """Defaults of features, with heads in two parts where these differ; what they hold may spill.

    The `first` of the devices has the first feature. A family has the one whose turn it is, or the next that it serves,
    and each of the two families of a backward pass has one of its own.
    """
    found = []
    for number, spec in enumerate(map(Specialization.parse, FEATURES), start=first):
        for step, row in enumerate(in_turn(rows, spec)):
            turn = (number + step) % len(devices)
            able = [each for each in devices[turn:] + devices[:turn] if unsupported(row, spec, each) is None]
            chosen = able[:1]
            if spec.key in BY_DESCRIPTORS and chosen and not chosen[0].has_warpgroup_mma:
                chosen += [each for each in able if each.has_wgmma]
            found += [variants(row.default(spec, device), spec, device)[-1] for device in chosen]
            if chosen and spec.key in SHARED:
                found += [replace(job, config=job.config.replace(split_keys=True)) for job in found[-len(chosen) :]]
    return found


def in_turn(rows: Rows, spec: Specialization) -> list[KernelFamily]:
    """The families of a direction; of decoding those for wgmma last, which take no turn from that for all targets."""
    last = for_wgmma(rows, spec) if spec.direction == STEP else []
    return sorted((row for row in rows if row.direction == spec.direction), key=lambda row: row in last)


def variants(config: Config, spec: Specialization, device: Device) -> list[Job]:
    """A default, and the same with heads in two parts."""
    configs = [config]
    if dict(config.knobs).get("split_d") is False:
        configs += [each for each in [config.replace(split_d=True)] if not invalid(each, spec, device)]
    return [Job(spec=spec, config=each, device=device, may_spill=True) for each in configs]


def with_steps(rows: Rows, device: Device) -> list[Job]:
    """Configs of decoding at sizes that a default does not know, of each family."""
    found = []
    for key, batch, queries in STEPS:
        spec, sizes = Specialization.parse(key), DECODE._replace(batch=batch, seqlen_q=queries)
        for row in serving(rows, spec, device):
            config = usual(row.default(spec, device), spec, sizes, device)
            found.append(Job(spec=spec, config=config, device=device, may_spill=False))
    return found


def with_functions(rows: Rows, device: Device) -> list[Job]:
    """Defaults of families for all targets with functions of a user and a block mask; what they hold may spill."""
    spec = Specialization(direction="forward", dtype="bf16", head_dim=128, head_dim_v=128, mods=FUNCTIONS)
    others = for_wgmma(rows, spec)
    chosen = [row for row in serving(rows, spec, device) if row not in others]
    return [Job(spec=spec, config=row.default(spec, device), device=device, may_spill=True) for row in chosen]


def functions_for_wgmma(rows: Rows, device: Device) -> list[Job]:
    """The same of families for wgmma, and functions without lists, in packed sequences."""
    listed = Specialization(direction="forward", dtype="bf16", head_dim=128, head_dim_v=128, mods=FUNCTIONS)
    packed = replace(listed, causal=True, varlen=True, mods=replace(FUNCTIONS, block_mask=False))
    back = replace(listed, direction="backward")
    wide = replace(back, head_dim=256, head_dim_v=256)
    chosen = [(row, spec) for spec in (listed, packed) for row in serving(for_wgmma(rows, spec), spec, device)]
    # of a backward pass the family that serves by default: lists, and heads of which dk and dv have a warpgroup each
    chosen += [(row, spec) for spec in (back, wide) for row in serving(for_wgmma(rows, spec), spec, device)[:1]]
    return [Job(spec=spec, config=row.default(spec, device), device=device, may_spill=True) for row, spec in chosen]


def specializations(passes: dict[str, tuple[Shape, ...]]) -> list[Specialization]:
    """Those of the shapes of each direction."""
    return [
        Specialization(direction=direction, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim, causal=causal)
        for direction, found in passes.items()
        for dtype, head_dim, causal in found
    ]


def other_loads(config: Config, spec: Specialization, device: Device) -> list[Config]:
    """Of VARIED, the config with the other kind of loads where the device allows it."""
    loads = dict(config.knobs).get("loads")
    if (spec.dtype, spec.head_dim) != VARIED or loads is None:
        return []
    other = config.replace(loads="pointer" if loads == "descriptor" else "descriptor")
    return [] if invalid(other, spec, device) else [other]


def for_short_queries(config: Config, spec: Specialization, device: Device) -> list[Config]:
    """Of VARIED, what the config becomes for a decoding step of heads in groups."""
    short = fitted(config, spec, DECODE, device)
    return [short] if (spec.dtype, spec.head_dim) == VARIED and short != config else []
