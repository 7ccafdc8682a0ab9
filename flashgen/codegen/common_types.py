"""Element types, as kernels in Triton, kernels in Gluon and torch write them."""

from __future__ import annotations

from flashgen.core.workload import Specialization

TL_DTYPES = {"bf16": "tl.bfloat16", "fp16": "tl.float16", "fp32": "tl.float32"}
GL_DTYPES = {"bf16": "gl.bfloat16", "fp16": "gl.float16"}
TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
PRECISIONS = {"fp32": "ieee", "tf32": "tf32"}
"""Of products of fp32 tiles: exact means IEEE, TF32 has three decimal digits."""


def storage(spec: Specialization) -> str:
    """The element type of q, k, v and out."""
    return "fp32" if spec.dtype == "tf32" else spec.dtype


def bias_dtype(spec: Specialization) -> str:
    """The element type of a bias."""
    return spec.bias_dtype or storage(spec)
