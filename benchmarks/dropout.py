"""What dropout costs, in both directions, beside torch's kernels that have it: writes `results/<device>/dropout.csv`.

    python -m benchmarks.dropout [--seconds 0.3]

Each workload is called without dropout and with `dropout_p=0.1`. Outputs are random, so nothing is compared here:
`tests/gpu/test_dropout_gpu.py` does that against the reference.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

import flashgen
from benchmarks.dropout_tables import SUITE
from benchmarks.exit_codes import MISSING
from benchmarks.forward import say
from benchmarks.opened import opened, usage_of
from benchmarks.provenance import add_arguments, serve_generated
from benchmarks.results import COLUMNS
from flashgen.core.errors import FlashgenError
from flashgen.core.workload import Workload
from flashgen.measure.bench import INPUT_SEED

DROPOUT_P = 0.1
NHEADS = 16
HEAD_DIMS, SEQLENS, TOKENS = (64, 128), (1024, 4096), 16384
WHERE = torch.device("cuda", 0)

Tensor = torch.Tensor
Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
"""(q, k, v, causal) to the output."""


def _flashgen(dropout_p: float) -> Attend:
    return lambda q, k, v, causal: flashgen.attention(q, k, v, causal=causal, dropout_p=dropout_p)


def _sdpa(backend: SDPBackend) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, dropout_p=DROPOUT_P, is_causal=causal)

    return attend


IMPLS: Mapping[str, Attend] = {
    "flashgen": _flashgen(0.0),
    "flashgen-dropout": _flashgen(DROPOUT_P),
    "sdpa-flash-dropout": _sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa-efficient-dropout": _sdpa(SDPBackend.EFFICIENT_ATTENTION),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done, 4 if flashgen could not run a workload."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dropout", description=(__doc__ or "").split("\n")[0])
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=0.3, help="least time of a measurement (%(default)s)")
    options = parser.parse_args(arguments)
    with usage_of(parser):
        provenance, file = opened(options, "dropout", COLUMNS)
    done, failed = file.done(provenance.commit), 0
    with tempfile.TemporaryDirectory() as scratch:
        serve_generated(None, Path(scratch))
        for workload, name in itertools.product(grid(), IMPLS):
            if (SUITE, workload.key, name) in done:
                continue
            try:
                time_ms = median_ms(workload, IMPLS[name], where=WHERE, seconds=options.seconds)
            except (FlashgenError, RuntimeError) as error:
                say(f"{workload.key} {name}: no row: {str(error).splitlines()[0]}")
                failed += name.startswith("flashgen")
                continue
            version = flashgen.__version__ if name.startswith("flashgen") else torch.__version__
            file.write([provenance.row(SUITE, workload, name, version, median_ms=time_ms)])
            say(f"{workload.key} {name:24} {time_ms:8.3f} ms")
    print(f"{file.path}: {len(file.rows)} rows")
    return MISSING if failed else 0


def grid() -> tuple[Workload, ...]:
    """16k tokens as sequences of 1k and 4k, 16 heads of 64 and 128, with and without a causal mask, both directions."""
    return tuple(
        Workload(direction=direction, batch=TOKENS // s, nheads=NHEADS, seqlen_q=s, head_dim=d, causal=causal)
        for direction, d, causal, s in itertools.product(("forward", "backward"), HEAD_DIMS, (False, True), SEQLENS)
    )


def median_ms(workload: Workload, attend: Attend, *, where: torch.device, seconds: float) -> float:
    """The median time of a call, or of the backward pass of one."""
    generator = torch.Generator(where).manual_seed(INPUT_SEED)
    w, is_backward = workload, workload.direction == "backward"
    shapes = [(w.batch, heads, w.seqlen_k, w.head_dim) for heads in (w.nheads, w.nheads_k, w.nheads_k)]
    q, k, v = (torch.randn(s, generator=generator, device=where).bfloat16().requires_grad_(is_backward) for s in shapes)
    names: dict[str, object] = {"attend": attend, "q": q, "k": k, "v": v, "causal": w.causal}
    statement = "attend(q, k, v, causal)"
    if is_backward:
        out = attend(q, k, v, w.causal)
        names |= {"grad": torch.autograd.grad, "out": out, "dout": torch.randn_like(out)}
        statement = "grad(out, (q, k, v), dout, retain_graph=True)"
    timer = Timer(statement, globals=names)
    timer.timeit(2)  # compiles
    return float(timer.blocked_autorange(min_run_time=seconds).median * 1e3)


if __name__ == "__main__":
    sys.exit(main())
