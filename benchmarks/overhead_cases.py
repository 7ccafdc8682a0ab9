"""What `overhead` times: ways to call attention on one small shape, each with the tensors for one loop of calls."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import flashgen
from benchmarks.flex import flex_module
from benchmarks.impls import FA3_MODULE, cudnn_version, fa3_function, fa3_version
from benchmarks.provenance import serve_generated
from flashgen.codegen.build import compile_kernel
from flashgen.codegen.families import beside, unsupported
from flashgen.codegen.generated import load_module
from flashgen.codegen.hopper_forward.family import HOPPER_FORWARD
from flashgen.codegen.portable_forward.family import PORTABLE_FORWARD
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.record import Measurement, TuningRecord
from flashgen.core.workload import Workload
from flashgen.db.store import Store
from flashgen.launch.binding import Binding
from flashgen.launch.geometry import Geometry
from flashgen.launch.gpu import current_device
from flashgen.launch.plan import make_plan
from flashgen.launch.triton_plan import TritonForward
from flashgen.measure import baselines

SMALL = Workload(batch=1, nheads=8, seqlen_q=128, head_dim=128, causal=True)
"""A few microseconds of device time: less than any way to launch it takes on the host."""

HOPPER = "hopper"
"""What ends the names of cases of the Hopper family, as the kind of loads ends those of the portable one."""

FIRST_SEQLEN, MOST_SEQLEN = 65, 2048
POOL = 64
"""Sets of tensors that the case with fresh pointers takes in turn."""

MOST_NEW_SEQLENS = 20
"""Calls of one loop that each have a length of their own; a loop never meets a length again."""

MOST_TRAINING_CALLS = 100
"""Calls of one loop with a backward pass, each of which launches up to six kernels: fewer than the queue holds."""

Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
Context = Callable[[], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to call; `arguments(loop, calls)` gives the tensors of each call of a loop."""

    name: str
    version: str
    call: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
    arguments: Callable[[int, int], Sequence[Arguments]]
    workload: Workload = SMALL
    keeps_outputs: bool = False
    most_calls: int = 1024
    context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


def peer_cases() -> list[Case]:
    """The other implementations that are there when they are imported, and the least that any call of torch costs."""
    same, bshd = _same(_tensors()), _same(_tensors(bshd=True))
    cases = [Case(name="torch-empty-like", version=torch.__version__, call=_empty_like, arguments=same)]
    versions = {"sdpa-flash": torch.__version__, "sdpa-cudnn": cudnn_version()}
    for impl, version in versions.items():
        call = baselines.sdpa_call(impl, SMALL)
        cases += [
            Case(name=impl, version=version, call=call.run, arguments=same, context=call.context),
            Case(
                name=f"{impl}/new-seqlen",
                version=version,
                call=call.run,
                arguments=new_seqlens(),
                most_calls=MOST_NEW_SEQLENS,
                context=call.context,
            ),
        ]
    if importlib.util.find_spec(FA3_MODULE) is None:
        print(f"fa3: no row: {FA3_MODULE} is not installed")
    else:
        function = fa3_function()
        call_fa3 = partial(function, causal=True)
        cases.append(Case(name="fa3", version=fa3_version(), call=call_fa3, arguments=bshd))
    return cases


def compiled_cases() -> list[Case]:
    """FlexAttention, which compiles longer than all others together are timed."""
    return [Case(name="flex", version=torch.__version__, call=_flex(), arguments=_same(_tensors()))]


def config_of(loads: str, device: Device) -> Config | None:
    """The default config of the portable family with `loads` pointers or descriptors, or that of the Hopper family.

    None where a device has no such kernel.
    """
    spec = SMALL.specialization
    if loads != HOPPER:
        return PORTABLE_FORWARD.default(spec, device).replace(loads=loads)
    return None if unsupported(HOPPER_FORWARD, spec, device) else HOPPER_FORWARD.default(spec, device)


def cases_of(loads: str, folder: Path) -> list[Case]:
    """A kernel, called and launched in every way that flashgen has, beside SDPA in the same turns.

    Raises:
        RuntimeError: the database made for it does not serve this kernel, or others of its record.
    """
    device = current_device()
    config = config_of(loads, device)
    if config is None:
        print(f"{loads}: no row: {device.arch} has no such kernel")
        return []
    database = folder / f"{loads}.sqlite3"
    write_records(database, config, device)
    serve_generated(database, folder)
    flashgen.reload()
    make_ready(config, device)
    same, version = _same(_tensors()), flashgen.__version__
    return [
        Case(name=f"flashgen/same-pointers/{loads}", version=version, call=_attention, arguments=same),
        Case(
            name=f"flashgen/fresh-pointers/{loads}",
            version=version,
            call=_attention,
            arguments=_fresh(),
            keeps_outputs=True,
        ),
        Case(
            name=f"flashgen/new-seqlen/{loads}",
            version=version,
            call=_attention,
            arguments=new_seqlens(),
            most_calls=MOST_NEW_SEQLENS,
        ),
        Case(name=f"flashgen/lse/{loads}", version=version, call=_attention_lse, arguments=same),
        Case(
            name=f"flashgen/bshd/{loads}", version=version, call=_attention_bshd, arguments=_same(_tensors(bshd=True))
        ),
        *_launches(loads, config, device),
        *_sdpa_cases(same, f"/same-pointers/{loads}", f"/new-seqlen/{loads}"),
    ]


def _sdpa_cases(same: Callable[[int, int], list[Arguments]], repeated: str, new_length: str) -> list[Case]:
    """SDPA with the same tensors, and with a length never seen before, under these ends of names.

    cuDNN builds a plan of 40 ms for every length, which is timed once, beside the other peers.
    """
    cases = []
    for impl, version in (("sdpa-flash", torch.__version__), ("sdpa-cudnn", cudnn_version())):
        call = baselines.sdpa_call(impl, SMALL)
        case = Case(name=f"{impl}{repeated}", version=version, call=call.run, arguments=same, context=call.context)
        cases.append(case)
        if impl == "sdpa-flash":
            name, lengths = f"{impl}{new_length}", new_seqlens()
            cases.append(replace(case, name=name, arguments=lengths, most_calls=MOST_NEW_SEQLENS))
    return cases


def training_cases() -> list[Case]:
    """Calls of training: a forward pass whose gradient will be asked for, and forward and backward pass together.

    Flashgen serves them from the shipped databases. Tensors are leaves; graphs are let go of at once.
    """
    leaves = _same(tuple(tensor.requires_grad_() for tensor in _tensors()))  # type: ignore[arg-type]
    dout = _tensors()[0]
    calls: list[tuple[str, str, Attend, Context]] = [
        ("flashgen", flashgen.__version__, _attention, contextlib.nullcontext)
    ]
    for impl, version in (("sdpa-flash", torch.__version__), ("sdpa-cudnn", cudnn_version())):
        call = baselines.sdpa_call(impl, SMALL)
        calls.append((impl, version, call.run, call.context))
    cases = []
    for impl, version, attend, context in calls:
        both = partial(_forward_backward, attend, dout)
        for name, way in (("train-forward", attend), ("train-forward-backward", both)):
            case = Case(
                name=f"{impl}/{name}",
                version=version,
                call=way,
                arguments=leaves,
                most_calls=MOST_TRAINING_CALLS,
                context=partial(_with_grad, context),
            )
            cases.append(case)
    return cases


def _forward_backward(attend: Attend, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
    out: Any = attend(q, k, v)
    return torch.autograd.grad(out, (q, k, v), dout)


@contextlib.contextmanager
def _with_grad(context: Context) -> Iterator[None]:
    with torch.enable_grad(), context():
        yield


def write_records(path: Path, config: Config, device: Device) -> None:
    """A database whose records are nearest to every length of `new_seqlens` and all have `config`."""
    with Store.open(path) as store:
        for seqlen in (64, 128, 256, 512, 1024, 2048):
            workload = SMALL.with_shape(seqlen_q=seqlen, seqlen_k=seqlen)
            store.put_record(
                TuningRecord(
                    workload=workload,
                    device=device,
                    config=config,
                    provenance="measured",
                    measurement=Measurement(times_ms=(1.0,)),
                )
            )


def new_seqlens(first: int = FIRST_SEQLEN, most: int = MOST_SEQLEN) -> Callable[[int, int], list[Arguments]]:
    """Views of one set of long tensors; every call of every loop has another length (while there are any left)."""
    long = _tensors(seqlen=most)

    def arguments(loop: int, calls: int) -> list[Arguments]:
        lengths = [first + (loop * calls + n) % (most - first) for n in range(calls)]
        return [(long[0][:, :, :s], long[1][:, :, :s], long[2][:, :, :s]) for s in lengths]

    return arguments


def _launches(loads: str, config: Config, device: Device) -> list[Case]:
    """The same kernel without flashgen's call: through the driver, `CompiledKernel[grid]`, and Triton's JIT."""
    import triton

    spec = SMALL.specialization
    compiled = compile_kernel(spec, config, device)
    q, k, v = _tensors()
    out = torch.empty_like(q)
    geometry, scale = Geometry.of(q, k, v, out), SMALL.head_dim**-0.5
    driver = make_plan(compiled, spec, config, geometry, 0)
    portable = TritonForward(Binding.of(compiled, spec, config, geometry), 0)
    jit: Any = getattr(load_module(compiled.source), f"{compiled.source.entry}_call")

    def launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        driver(q, k, v, out, None, scale)

    def compiled_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        portable(q, k, v, out, None, scale)

    same = _same((q, k, v))
    return [
        Case(name=f"flashgen-plan/{loads}", version=flashgen.__version__, call=launch, arguments=same),
        Case(name=f"triton-compiled-kernel/{loads}", version=triton.__version__, call=compiled_kernel, arguments=same),
        Case(name=f"triton-jit/{loads}", version=triton.__version__, call=jit, arguments=same),
    ]


def serving(config: Config, device: Device) -> set[Config]:
    """What may serve lengths where `write_records` had a config: another tile of it, where that fills the SMs."""
    return {config, *beside(config, SMALL.specialization, device)}


def make_ready(config: Config, device: Device) -> None:
    """Compile what serves the lengths of `new_seqlens`, and forget that any was seen.

    Raises:
        RuntimeError: something else serves one of them.
    """
    able, ready = serving(config, device), set[Config]()
    for q, k, v in [_tensors(), *new_seqlens()(0, MOST_SEQLEN - FIRST_SEQLEN)]:
        served = flashgen.explain(q, k, v, causal=True).served
        if served.config not in able:
            raise RuntimeError(f"the records made for this benchmark must serve {config}, got rung {served.rung}")
        if served.config not in ready:
            _attention(q, k, v)
            ready.add(served.config)
    flashgen.reload()


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
    return flashgen.attention(q, k, v, causal=True)


def _attention_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
    return flashgen.attention(q, k, v, causal=True, return_lse=True)


def _attention_bshd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
    return flashgen.attention(q, k, v, layout="bshd", causal=True)


def _empty_like(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
    return torch.empty_like(q)


def _flex() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]:
    module = flex_module()
    torch._dynamo.reset()
    compiled: Any = torch.compile(module.flex_attention, dynamic=False)
    rows, columns = SMALL.seqlen_q, SMALL.seqlen_k
    mask = module.create_block_mask(lambda b, h, i, j: i >= j, None, None, rows, columns, device="cuda")

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
        out: object = compiled(q, k, v, block_mask=mask)
        return out

    return call


def _tensors(*, seqlen: int = SMALL.seqlen_q, bshd: bool = False) -> Arguments:
    shape = [SMALL.batch, SMALL.nheads, seqlen, SMALL.head_dim]
    if bshd:
        shape[1], shape[2] = shape[2], shape[1]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(3))
    return q, k, v


def _same(tensors: Arguments) -> Callable[[int, int], list[Arguments]]:
    return lambda loop, calls: [tensors] * calls


def _fresh() -> Callable[[int, int], list[Arguments]]:
    pool = [_tensors() for _ in range(POOL)]
    return lambda loop, calls: list(itertools.islice(itertools.cycle(pool), calls))
