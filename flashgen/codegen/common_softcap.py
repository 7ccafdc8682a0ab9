"""How a softcap's tanh is computed: by an exponential and a reciprocal, or by the GPU's own instruction.

The instruction (`tanh.approx.f32`, as FlashAttention-3 uses it) is right to 11 bits, one special function a score
instead of two. Times a cap of 50 that is 0.02 of a score: a 16-bit output does not show it, an LSE does. So a call that
asks for the LSE, or trains, gets the exact sibling of such a config (docs/decisions/hardware-tanh.md).
"""

from __future__ import annotations

from flashgen.codegen.family import Knob
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.workload import Specialization

EXACT, HARDWARE = "exact", "hardware"

TANH = Knob(
    name="tanh",
    values=(EXACT, HARDWARE),
    meaning="softcap: by an exponential and a reciprocal, or by the GPU's own instruction where no LSE is asked for",
    default=EXACT,
    implied=True,
)


def tanh(config: Config) -> str:
    """How a config computes it; one that is older than the knob means the exact way."""
    return str(config.get(TANH.name, EXACT))


def exact_sibling(spec: Specialization, config: Config) -> Config:
    """`config` with a tanh that is exact enough for an LSE."""
    return config if tanh(config) == EXACT else config.replace(tanh=EXACT)


def tanh_values(spec: Specialization) -> tuple[KnobValue, ...]:
    """What a specialization leaves of the knob, on any device."""
    return TANH.values if _why_exact(spec) is None else (EXACT,)


def why_not_tanh(spec: Specialization, config: Config, device: Device) -> str | None:
    """Why a config's tanh does not serve, or None."""
    if tanh(config) == EXACT:
        return None
    if not device.is_nvidia:
        return f"{device.arch} has no instruction for it"
    return _why_exact(spec)


def _why_exact(spec: Specialization) -> str | None:
    if not spec.softcap:
        return "without a softcap no score has a tanh"
    if spec.dtype not in ("bf16", "fp16"):
        return f"outputs of {spec.dtype} show what a tanh of 11 bits is off by"
    return None
