"""User functions and block masks in the portable families: what their templates, launches and checks need."""

from __future__ import annotations

from flashgen.codegen.family import Parameter
from flashgen.core.config import Config
from flashgen.core.features.functions import LISTS, QUERY_LISTS, list_pointer
from flashgen.core.score_mods import MASK_BLOCK, UserFunction
from flashgen.core.workload import Specialization

BLOCK_LISTS = {name: list_pointer(name) for name in (*LISTS, *QUERY_LISTS)}
"""The parameters of a block mask's lists by the names of its tensors."""

MAX_SCORE_REGISTERS = 128
"""Of a thread. Functions hold values of their own for each score; with more than this, kilobytes are spilled."""

SIZES = ("stride_block_b", "stride_block_h", "num_k_blocks")


def aux_names(spec: Specialization) -> list[str]:
    """Names of the parameters for the tensors of the user's functions."""
    return [f"Aux{i}" for i in range(len(spec.mods.aux))] if spec.mods else []


def daux_names(spec: Specialization) -> list[str]:
    """Names of the parameters for the gradients of these tensors, of those that have one."""
    return [f"DAux{i}" for i in range(len(spec.mods.aux_grads))] if spec.mods else []


def has_blocks(spec: Specialization) -> bool:
    """Whether the kernel walks the blocks of a block mask."""
    return spec.mods is not None and spec.mods.block_mask


def hides(spec: Specialization) -> bool:
    """Whether a function of the user says which keys are visible."""
    return spec.mods is not None and spec.mods.mask_mod is not None


def host_features(spec: Specialization) -> list[str]:
    """The features that a launcher which stands alone takes as arguments, by the names of the call."""
    asked: dict[str, object] = {
        "window": spec.window,
        "softcap": spec.softcap,
        "alibi_slopes": spec.alibi,
        "sinks": spec.sink,
    }
    asked |= {"bias": spec.bias, "mask": spec.mask, "aux": aux_names(spec), "block_mask": has_blocks(spec)}
    asked |= {"dropout_p": spec.dropout, "rng_state": spec.dropout}
    return [name for name, is_asked in asked.items() if is_asked]


def mod_values(spec: Specialization) -> dict[str, object]:
    """Values of the template."""
    mods = spec.mods
    return {
        "score_mod": _named("score_mod", mods.score_mod) if mods and mods.score_mod else "",
        "mask_mod": _named("mask_mod", mods.mask_mod) if mods and mods.mask_mod else "",
        "aux": aux_names(spec),
        "block_mask": has_blocks(spec),
        "mask_block": MASK_BLOCK,
    }


def mod_step_arguments(spec: Specialization) -> list[str]:
    """What a step of the loop reads for the functions, beside what every step has; `b` is among them for pointers."""
    return ["h", "row", "last_key", *aux_names(spec)] if spec.mods else []


def aux_parameters(spec: Specialization) -> list[Parameter]:
    """The run-time parameters of the functions, in order."""
    return [Parameter(name=name, type=f"*{kind}") for name, kind in zip(aux_names(spec), _aux(spec), strict=True)]


def mod_parameters(spec: Specialization, *, by_keys: bool = False) -> list[Parameter]:
    """These, and those of a block mask; `by_keys` is a kernel whose programs own keys and walk query blocks."""
    return [*aux_parameters(spec), *_block_parameters(spec, by_keys=by_keys)]


def block_names(spec: Specialization, *, by_keys: bool = False) -> list[str]:
    """Names of the parameters of a block mask alone, likewise."""
    return [parameter.name for parameter in _block_parameters(spec, by_keys=by_keys)]


def _block_parameters(spec: Specialization, *, by_keys: bool) -> list[Parameter]:
    if not has_blocks(spec):
        return []
    found = [Parameter(name=name, type="*i32") for name in map(list_pointer, QUERY_LISTS if by_keys else LISTS)]
    return found + [Parameter(name=name, type="i32") for name in (*(["num_q_blocks"] if by_keys else []), *SIZES)]


def why_mods_do_not_fit(spec: Specialization, config: Config, threads: int) -> str | None:
    """The reason why a config of so many threads cannot compute a user's functions or walk a block mask, or None."""
    if spec.mods is None:
        return None
    if has_blocks(spec):
        for knob in ("block_m", "block_n"):
            if MASK_BLOCK % config.integer(knob):
                return f"{knob} {config.integer(knob)} does not divide the {MASK_BLOCK} of a block mask"
    scores = config.integer("block_m") * config.integer("block_n") // threads
    if scores > MAX_SCORE_REGISTERS:
        return f"beside user functions a thread has {MAX_SCORE_REGISTERS} registers for scores, not {scores}"
    return None


def _named(name: str, function: UserFunction) -> str:
    """The source under the name that the template calls: no name of a user's can be one of the kernel's own."""
    return function.source.replace(f"def {function.name}(", f"def {name}(", 1)


def _aux(spec: Specialization) -> tuple[str, ...]:
    return spec.mods.aux if spec.mods else ()
