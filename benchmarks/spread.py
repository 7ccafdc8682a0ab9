"""How far the gradients of equal calls lie apart, for every backward family: writes `results/<device>/spread.csv`.

    python -m benchmarks.spread [--repeats 100]

A family that adds to dq with atomics adds in another order every time. What that changes is set beside the rounding
error that one call has anyway, against the float64 oracle. The other families must give the same bits.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

import flashgen
from benchmarks.forward import say
from benchmarks.opened import opened, usage_of
from benchmarks.provenance import Provenance, add_arguments
from benchmarks.results import SPREAD_COLUMNS, Row
from flashgen.codegen.build import compile_kernel
from flashgen.codegen.families import FAMILIES, family, unsupported
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import FlashgenError
from flashgen.core.workload import Workload
from flashgen.launch.backward import BackwardTensors, backward_geometry
from flashgen.launch.gpu import current_device
from flashgen.launch.plan import make_backward_plan
from flashgen.measure.backward_inputs import make_backward_inputs
from flashgen.measure.backward_reference import exact_gradients
from flashgen.measure.bench import INPUT_SEED
from flashgen.measure.score_rule import ScoreRule
from flashgen.tuning.compile_pool import CompilePool, usable_cpus

SUITE = "spread"
NHEADS = 16
HEAD_DIMS, SEQLENS = (64, 128), (2048, 8192)
BACKWARD = tuple(row.id for row in FAMILIES if row.direction == "backward")
FEWEST_REPEATS = 2
WHERE = torch.device("cuda", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What repeats of one call differ by.

    Attributes:
        differing: share of the elements of dq that did not have the same bits every time.
        spread_max: the largest distance between two values of one element of dq, over the largest |dq|.
        spread_mean: the mean over all elements, likewise.
        error_max: the largest distance of the first dq from the float64 oracle's, over the largest |dq|, of one head.
        error_mean: the mean, likewise.
        ulps_max: the largest distance between two values of one element, in steps of the dtype at its size.
        ulps_mean: the mean over all elements, likewise.
        others_differing: elements of dk and dv that did not have the same bits, summed over repeats.
    """

    differing: float
    spread_max: float
    spread_mean: float
    error_max: float
    error_mean: float
    ulps_max: float
    ulps_mean: float
    others_differing: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done, 1 if a family that promises the same bits gave others, or could not be run."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.repeats < FEWEST_REPEATS:
        parser.error(f"--repeats is {FEWEST_REPEATS} or more, got {options.repeats}")
    with usage_of(parser):
        provenance, file = opened(options, "spread", SPREAD_COLUMNS)
    done = file.done(provenance.commit)
    device = current_device()
    jobs = [job for job in jobs_of(grid(), device) if (SUITE, job[0].key, job[1].family) not in done]
    compile_ahead(jobs, device)
    broken = 0
    for workload, config in jobs:
        try:
            found = measured(workload, launcher(config, device), where=WHERE, repeats=options.repeats)
        except FlashgenError as error:
            say(f"{workload.key} {config.family}: no row: {str(error).splitlines()[0]}")
            broken += 1
            continue
        file.write([_row(workload, config.family, found, provenance, options.repeats)])
        say(f"{workload.key} {line_of(config.family, found)}")
        broken += found.others_differing > 0 or (family(config.family).is_deterministic and found.differing > 0)
    print(f"{file.path}: {len(file.rows)} rows")
    return 1 if broken else 0


def grid() -> tuple[Workload, ...]:
    """One sequence of 2k and of 8k, 16 heads of 64 and of 128, with and without a causal mask."""
    return tuple(
        Workload(direction="backward", batch=1, nheads=NHEADS, seqlen_q=s, head_dim=d, causal=causal)
        for d, causal, s in itertools.product(HEAD_DIMS, (False, True), SEQLENS)
    )


def jobs_of(workloads: Sequence[Workload], device: Device) -> list[tuple[Workload, Config]]:
    """Every workload with the default config of every backward family that serves it on `device`."""
    found = []
    for workload, name in itertools.product(workloads, BACKWARD):
        spec = workload.specialization
        if unsupported(family(name), spec, device) is None:
            found.append((workload, family(name).default(spec, device)))
    return found


def compile_ahead(jobs: Sequence[tuple[Workload, Config]], device: Device) -> None:
    """Fill Triton's cache by processes side by side; what fails to compile says so when it is launched."""
    wanted = {(workload.specialization, config) for workload, config in jobs}
    if not wanted:
        return
    with CompilePool(device, jobs=min(usable_cpus(), len(wanted))) as pool:
        for spec, config in wanted:
            pool.submit(spec, config)
        for spec, config in wanted:
            pool.result(spec, config)


Launch = Callable[[BackwardTensors], object]


def launcher(config: Config, device: Device) -> Callable[[Workload, BackwardTensors], Launch]:
    """What binds the kernels of a config to the tensors of a workload."""

    def bind(workload: Workload, tensors: BackwardTensors) -> Launch:
        spec = workload.specialization
        compiled = compile_kernel(spec, config, device)
        return make_backward_plan(compiled, spec, config, backward_geometry(tensors), 0)

    return bind


def measured(
    workload: Workload, bind: Callable[[Workload, BackwardTensors], Launch], *, where: torch.device, repeats: int
) -> Spread:
    """Repeat one call on equal inputs and compare what it writes."""
    inputs = make_backward_inputs(workload, copies=1, seed=INPUT_SEED, device=where)
    tensors = inputs.tensors[0]
    out, lse = _forward(tensors, causal=workload.causal)
    tensors.out.copy_(out)
    tensors.lse.copy_(lse)
    launch = bind(workload, tensors)
    launch(tensors)
    first = [tensor.clone() for tensor in (tensors.dq, tensors.dk, tensors.dv)]
    low, high = first[0].clone(), first[0].clone()
    differs, others = torch.zeros_like(low, dtype=torch.bool), torch.zeros((), dtype=torch.int64, device=where)
    for _ in range(repeats - 1):
        for tensor in (tensors.dq, tensors.dk, tensors.dv):
            tensor.fill_(float("nan"))
        launch(tensors)
        torch.minimum(low, tensors.dq, out=low)
        torch.maximum(high, tensors.dq, out=high)
        differs |= _bits(tensors.dq) != _bits(first[0])
        for tensor, before in zip((tensors.dk, tensors.dv), first[1:], strict=True):
            others += (_bits(tensor) != _bits(before)).sum()
    right = _last_dq(tensors, causal=workload.causal)
    return compared(first[0], low, high, differs, right, int(others))


def compared(
    first: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    differs: torch.Tensor,
    right: torch.Tensor,
    others_differing: int,
) -> Spread:
    """The figures of one call.

    Args:
        first: dq of the first call, (batch, nheads, seqlen_q, head_dim).
        low: the least value of each element over all calls.
        high: the greatest.
        differs: where the bits were not the same every time.
        right: dq of the last head of the first batch element in float64, (1, 1, seqlen_q, head_dim).
        others_differing: elements of dk and dv with other bits than those of the first call.
    """
    largest = float(first.abs().max())
    spread = high.float() - low.float()
    _, exponent = torch.frexp(torch.maximum(low.abs(), high.abs()).float())
    info = torch.finfo(first.dtype)
    ulps = spread / torch.ldexp(torch.full_like(spread, info.eps), exponent - 1).clamp_min(info.smallest_normal)
    error = (first[:1, -1:].double() - right).abs()
    return Spread(
        differing=float(differs.double().mean()),
        spread_max=float(spread.max()) / largest,
        spread_mean=float(spread.double().mean()) / largest,
        error_max=float(error.max()) / largest,
        error_mean=float(error.mean()) / largest,
        ulps_max=float(ulps.max()),
        ulps_mean=float(ulps.double().mean()),
        others_differing=others_differing,
    )


def line_of(family_id: str, found: Spread) -> str:
    """One row for people."""
    if not found.differing and not found.others_differing:
        error = f"error of dq {found.error_max:.2g} of the largest, mean {found.error_mean:.2g}"
        return f"{family_id:23} the same bits; {error}"
    return (
        f"{family_id:23} {found.differing:.1%} of dq differ by up to {found.spread_max:.2g} of the largest, mean "
        f"{found.spread_mean:.2g}; error of dq {found.error_max:.2g}, mean {found.error_mean:.2g}; up to "
        f"{found.ulps_max:.0f} ulps, mean {found.ulps_mean:.3f}; {found.others_differing} of dk and dv differ"
    )


def _row(workload: Workload, family_id: str, found: Spread, provenance: Provenance, repeats: int) -> Row:
    row = provenance.row(SUITE, workload, family_id, flashgen.__version__)
    numbers = {name: getattr(found, name) for name in Spread.__slots__}
    return replace(row, repeats=repeats, **numbers)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def _forward(tensors: BackwardTensors, *, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE by torch's own kernel."""
    name = "_scaled_dot_product_flash_attention" + ("" if tensors.q.is_cuda else "_for_cpu")
    op = getattr(torch.ops.aten, name)
    out, lse, *_ = op(tensors.q, tensors.k, tensors.v, 0.0, causal)
    return out, lse


def _last_dq(tensors: BackwardTensors, *, causal: bool) -> torch.Tensor:
    """The oracle's dq of the last head of the first batch element."""
    q, k, v, dout = (tensor[:1, -1:] for tensor in (tensors.q, tensors.k, tensors.v, tensors.dout))
    rule = ScoreRule.of(q, k, causal=causal, q_offset=None, softmax_scale=None, features=None)
    return exact_gradients(q, k, v, dout, rule).gradients["dq"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spread", description=(__doc__ or "").split("\n")[0])
    add_arguments(parser)
    parser.add_argument("--repeats", type=int, default=100, help="calls on equal inputs (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
