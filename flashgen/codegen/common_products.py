"""How the portable families multiply fp32 tiles: as IEEE, or in parts that tensor cores multiply, with equal accuracy.

An fp32 number is the sum of two TF32 numbers up to 2**-22 of it, or of three bf16 numbers up to 2**-24. Of the products
of parts all but the smallest are added up: three with TF32, six with bf16, which tensor cores multiply twice as fast.
Triton does either (`input_precision`), and adds each tile's sum to the accumulator in fp32, so that what tensor cores
drop when they add is that of one tile and not that of all keys (docs/decisions/products-in-parts.md).
"""

from __future__ import annotations

from flashgen.codegen.common_types import PRECISIONS
from flashgen.codegen.family import Knob
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.workload import Specialization

IEEE = "ieee"

PRODUCTS = Knob(
    name="products",
    values=(IEEE, "tf32x3", "bf16x6"),
    meaning="fp32: products by the ordinary units, or by tensor cores as three of TF32 parts or as six of bf16 parts",
    default=IEEE,
    implied=True,
)


def products(config: Config) -> str:
    """How a config multiplies fp32 tiles; one that is older than the knob means IEEE products."""
    return str(config.get(PRODUCTS.name, IEEE))


def precision(spec: Specialization, config: Config) -> str:
    """Triton's `input_precision`; empty where elements have 16 bits and there is nothing to choose."""
    return products(config) if spec.dtype == "fp32" else PRECISIONS.get(spec.dtype, "")


def uses_tensor_cores(spec: Specialization, config: Config) -> bool:
    """Whether tensor cores multiply."""
    return precision(spec, config) != IEEE


def products_values(spec: Specialization) -> tuple[KnobValue, ...]:
    """What a specialization leaves of the knob, on any device."""
    return PRODUCTS.values if spec.dtype == "fp32" else (IEEE,)


def why_not_products(spec: Specialization, config: Config, device: Device) -> str | None:
    """Why tiles cannot be multiplied the way that a config says, or None."""
    if products(config) == IEEE:
        return None
    if spec.dtype != "fp32":
        return f"elements of {spec.dtype} have no parts to multiply one by one"
    if not (device.is_nvidia and device.has_tf32):
        return f"Triton multiplies parts of fp32 on NVIDIA's tensor cores, not on {device.arch}"
    if products(config) == "bf16x6" and device.has_tensor_memory:
        return f"of six products of bf16 parts Triton 3.6 makes a kernel that traps on {device.arch}"
    return None
