"""What attention has to move and to compute: models of bytes, and the least time that follows from them on a device.

Standard attention is the one of `impls.standard_attention`: every kernel reads and writes whole tensors, Theta(N d +
N^2) bytes for a sequence of N. FlashAttention keeps a block of queries on an SM and reads all keys and values once for
each, Theta(N^2 d / block_m) (Dao et al. 2022, theorem 2, where the size of the on-chip memory M stands for d block_m).
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.core.device import Device
from flashgen.core.workload import DTYPE_BYTES, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One kernel of standard attention: bytes that it reads and writes, and floating-point operations of its product.

    `score_passes` is how often it goes over a matrix of the size of the scores, which its bytes include.
    """

    name: str
    bytes: int
    score_passes: int = 0
    flops: int = 0

    def least_ms(self, device: Device) -> float:
        """The longer of its bytes at the full bandwidth and its operations at the full rate of the tensor cores."""
        return max(self.bytes / (device.bandwidth_gbs * 1e6), self.flops / (device.peak_tflops * 1e9))


def standard_steps(workload: Workload) -> tuple[Step, ...]:
    """The kernels of standard attention, eager, in their order; a mask is a pass of its own over all scores.

    The mask itself is not counted: one for all heads, it stays in L2.
    """
    w, size = workload, DTYPE_BYTES[workload.dtype]
    heads = w.batch * w.nheads
    scores = size * heads * w.seqlen_q * w.seqlen_k
    q, out = (size * heads * w.seqlen_q * d for d in (w.head_dim, w.head_dim_v))
    k, v = (size * heads * w.seqlen_k * d for d in (w.head_dim, w.head_dim_v))
    pairs = 2 * heads * w.seqlen_q * w.seqlen_k  # operations of a product, by the width of what is multiplied
    mask = (Step(name="mask", bytes=2 * scores, score_passes=2),) if w.causal else ()
    if w.direction == "forward":
        return (
            Step(name="scale q", bytes=2 * q),
            Step(name="q k^T", bytes=q + k + scores, score_passes=1, flops=pairs * w.head_dim),
            *mask,
            Step(name="softmax", bytes=2 * scores, score_passes=2),
            Step(name="p v", bytes=scores + v + out, score_passes=1, flops=pairs * w.head_dim_v),
        )
    return (
        Step(name="dv", bytes=scores + out + v, score_passes=1, flops=pairs * w.head_dim_v),
        Step(name="dp", bytes=out + v + scores, score_passes=1, flops=pairs * w.head_dim_v),
        Step(name="softmax", bytes=3 * scores, score_passes=3),
        *mask,
        Step(name="dk", bytes=scores + q + k, score_passes=1, flops=pairs * w.head_dim),
        Step(name="dq", bytes=scores + k + q, score_passes=1, flops=pairs * w.head_dim),
        Step(name="scale dq", bytes=2 * q),
    )


def standard_traffic_bytes(workload: Workload) -> int:
    """Bytes of all kernels of standard attention, each reading its inputs and writing its results once."""
    return sum(step.bytes for step in standard_steps(workload))


def score_passes(workload: Workload) -> int:
    """How often standard attention goes over the scores."""
    return sum(step.score_passes for step in standard_steps(workload))


def standard_least_ms(workload: Workload, device: Device) -> float:
    """The least time of standard attention: its kernels run one after the other, each at a limit of the device."""
    return sum(step.least_ms(device) for step in standard_steps(workload))


def least_ms(workload: Workload, device: Device) -> float:
    """The least time of any attention: the visible pairs at the full rate of the tensor cores, or every tensor once."""
    return max(workload.flops / (device.peak_tflops * 1e9), workload.bytes / (device.bandwidth_gbs * 1e6))


def tiled_bytes(workload: Workload, block_m: int) -> int:
    """Bytes between L2 and the SMs of a forward pass without a mask: K and V for every block of queries, q and out."""
    w, size = workload, DTYPE_BYTES[workload.dtype]
    blocks = -(-w.seqlen_q // block_m)
    rows = blocks * w.seqlen_k + w.seqlen_q
    return size * w.batch * w.nheads * rows * (w.head_dim + w.head_dim_v)
