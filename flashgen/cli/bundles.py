"""Bundles of compiled kernels, for `flashgen db export` and `flashgen db import`."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.cli import output
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import BuildError, DatabaseError
from flashgen.core.record import TuningRecord
from flashgen.core.settings import TRUSTED, settings
from flashgen.core.workload import Specialization

if TYPE_CHECKING:
    from flashgen.codegen.helper import HelperKernel
    from flashgen.launch.bundles import Contents, Entry

SUFFIX = ".kernels"

PARENT_CHECK_S = 0.5
"""How often a worker looks whether the process that it compiles for is there."""

Job = tuple[Specialization, Config, Device]
HelperJob = tuple["HelperKernel", Device]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What a bundle is written of: compiled configs, the architectures that they are for, and the Triton."""

    entries: tuple[Entry, ...]
    targets: frozenset[str]
    triton: str


def compile_kernels(
    records: Iterable[TuningRecord], path: Path, processes: int | None, *, with_helpers: bool = False
) -> Kernels:
    """Compile the kernels of these records, for the devices that they are for, for a bundle beside the export `path`.

    `with_helpers` also compiles what calls around attention launch for such heads.

    Raises:
        DatabaseError: there are none, or there is a file of others where the bundle shall lie.
    """
    from flashgen.codegen.build_key import triton_version
    from flashgen.launch import bundles

    version = triton_version()
    if version is None:
        raise DatabaseError("a bundle is compiled by Triton, which is not installed here")
    bundles.check_target(path.with_suffix(SUFFIX))
    jobs = jobs_of(records)
    helpers = helper_jobs_of(jobs) if with_helpers else []
    entries: list[Entry] = []
    failures: list[str] = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawn, initializer=_end_with, initargs=(os.getpid(),)) as pool:
        for found in (*pool.map(_compiled, jobs), *pool.map(_compiled_helper, helpers)):
            if isinstance(found, str):
                failures.append(found)
            else:
                entries.append(found)
    for reason in dict.fromkeys(failures):
        output.say(f"left out: {reason}")
    if not entries:
        raise DatabaseError(f"a bundle needs kernels; none of {len(jobs)} can be given away")
    targets = frozenset(device.arch for _, _, device in jobs)
    return Kernels(entries=tuple(entries), targets=targets, triton=version)


def _end_with(parent: int) -> None:
    """End this worker when the process that it compiles for is gone: it would wait for its own pipe for ever."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def write_kernels(kernels: Kernels, path: Path) -> None:
    """Write the bundle beside an export.

    Raises:
        DatabaseError: it cannot be written.
    """
    from flashgen.launch import bundles

    written = bundles.write(path.with_suffix(SUFFIX), kernels.entries, kernels.targets, kernels.triton)
    output.say(f"{_words(written)} written to {path.with_suffix(SUFFIX)}")


def import_kernels(path: Path) -> None:
    """Take over the bundle beside an export, or the one that is named.

    Raises:
        DatabaseError: it is no bundle, damaged or for another GPU than that of this machine.
    """
    from flashgen.cli.arguments import device_here
    from flashgen.launch import bundles

    here = device_here()
    found = bundles.install(path.with_suffix(SUFFIX), target=None if here is None else here.arch)
    output.say(f"{_words(found)} taken over from {path.with_suffix(SUFFIX)}")
    if not settings().trust_binaries:
        output.say(f"they are loaded where FLASHGEN_BINARIES={TRUSTED} is set")


def jobs_of(records: Iterable[TuningRecord]) -> list[Job]:
    """What the calls of these records load, and calls of other sizes by them: each once, with and without an LSE."""
    from flashgen.codegen.families import beside, exact_sibling
    from flashgen.codegen.family import Sizes
    from flashgen.codegen.head_packing import fills_half
    from flashgen.runtime.warmup import variants

    jobs = [
        (spec, config, record.device)
        for record in records
        if record.device.is_nvidia
        for spec in variants(record.workload, offset_tensor=False)
        for own in (record.config, *beside(record.config, spec, record.device))
        if own == record.config or fills_half(own, Sizes.of(record.workload))
        for config in (own, exact_sibling(own, spec))
    ]
    unique = {(spec, config, device.arch): (spec, config, device) for spec, config, device in jobs}
    return list(unique.values())


def helper_jobs_of(jobs: Iterable[Job]) -> list[HelperJob]:
    """What `append_kv` and `merge_states` usually launch for the heads of these jobs, each once."""
    from flashgen.codegen.usual_helpers import usual_helpers

    found = [(helper, device) for spec, _, device in jobs for helper in usual_helpers(spec)]
    return list({(helper, device.arch): (helper, device) for helper, device in found}.values())


def _compiled_helper(job: HelperJob) -> Entry | str:
    """The kernel of a job, or why there is none."""
    from flashgen.launch import bundles

    helper, _ = job
    try:
        found = bundles.entry_of_helper(*job)
    except BuildError as error:
        return str(error)
    return (
        found
        or f"{helper.id} for {helper.key}, which cannot be launched without Triton or was compiled under variables"
    )


def _compiled(job: Job) -> Entry | str:
    """The kernels of a job, or why there are none."""
    from flashgen.launch import bundles

    try:
        found = bundles.entry_of(*job)
    except BuildError as error:
        return str(error)
    return (
        found or f"{job[1]} for {job[0].key}, which cannot be launched without Triton or was compiled under variables"
    )


def _words(found: Contents) -> str:
    size = sum(whole for whole, _ in found.sizes.values()), sum(packed for _, packed in found.sizes.values())
    return (
        f"{len(found.sizes)} kernels for {', '.join(found.targets)} by Triton {found.triton} "
        f"({size[1] / 1e6:.1f} MB, {size[0] / 1e6:.1f} MB unpacked, SHA-256 {found.digest})"
    )
