"""Element types of torch by the names of `core.workload.DTYPE_BYTES`."""

from __future__ import annotations

import torch

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
"""TF32 is a way to multiply fp32 data."""
