"""What `scripts/crosscompile.py` lets pass of spilled registers, and that it says so."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from flashgen.codegen.families import DECODE_FAMILIES, FAMILIES, invalid, validate
from flashgen.codegen.family import KernelFamily
from flashgen.core.device import find_device
from flashgen.core.workload import Specialization
from scripts import crosscompile, crosscompile_jobs
from scripts.crosscompile_jobs import Job

GFX1200 = find_device("gfx1200")


def outcome(monkeypatch: pytest.MonkeyPatch, job: Job, spills: int) -> tuple[bool, str]:
    compiled = SimpleNamespace(spills=spills, device=job.device, parts=())
    monkeypatch.setattr(crosscompile, "compile_kernel", lambda spec, config, device: compiled)
    return crosscompile.compile_one(job)


@pytest.mark.parametrize("row", FAMILIES, ids=lambda row: row.id)
def test_a_default_above_the_limit_of_its_family_fails(row: KernelFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Specialization.parse(f"{'bwd' if row.direction == 'backward' else 'fwd'}-bf16-d64")
    config = row.default(spec, find_device("h200"))
    job = Job(spec=spec, config=config, device=GFX1200, may_spill=False)
    limit = row.default_spills
    assert outcome(monkeypatch, job, limit)[0]
    passed, remark = outcome(monkeypatch, job, limit + 4)
    assert not passed
    assert f"{limit + 4} bytes of local memory per thread, {limit} allowed" in remark
    allowed = Job(spec=spec, config=config, device=GFX1200, may_spill=True)
    passed, remark = outcome(monkeypatch, allowed, limit + 4)
    assert passed
    assert "not limited" in remark


def test_what_defaults_may_spill_is_what_the_script_says() -> None:
    assert crosscompile.__doc__ is not None
    found = re.search(r"`default_spills`: from (\d+) to (\d+)\s+bytes of local memory", crosscompile.__doc__)
    assert found is not None
    limits = [row.default_spills for row in FAMILIES]
    assert (min(limits), max(limits)) == (int(found[1]), int(found[2]))


@pytest.mark.parametrize("few", [False, True])
def test_plain_defaults_are_limited_under_the_oldest_and_the_newest_triton(few: bool) -> None:
    rows = list(FAMILIES)
    jobs = crosscompile_jobs.few_jobs(rows) if few else crosscompile_jobs.jobs(rows, list(crosscompile_jobs.TARGETS))
    limited = {(job.config.family, job.device.arch) for job in jobs if not job.may_spill}
    assert {name for name, _ in limited} == {row.id for row in FAMILIES}
    fp32 = [job for job in jobs if job.spec.dtype == "fp32" and not job.may_spill]
    assert [(job.device.arch, job.spec.key) for job in fp32] == [("gfx1200", "fwd-fp32-d128-causal")]


def test_programs_that_do_not_fit_beside_each_other_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = crosscompile_jobs.with_steps(DECODE_FAMILIES, find_device("h200"))
    job = next(job for job in steps if job.config.integer("per_sm") > 1)
    wanted = job.config.integer("per_sm")
    for fits in (wanted, wanted - 1):
        main = SimpleNamespace(occupancy=lambda device, fits=fits: fits)
        compiled = SimpleNamespace(spills=0, device=job.device, main=main, parts=())
        monkeypatch.setattr(crosscompile, "compile_kernel", lambda spec, config, device, found=compiled: found)
        passed, remark = crosscompile.compile_one(job)
        assert passed is (fits == wanted)
        assert passed or "programs instead of" in remark


def test_values_that_roles_are_handed_too_early_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    summed = "ld.shared.b32 %r1, [global_smem+8];\n{}st.shared.b32 [global_smem+8], %r2;\nbarrier.sync 1;\n"
    job = next(job for job in crosscompile_jobs.jobs(list(FAMILIES), ["sm90"]) if job.spec.varlen)
    for between, right in (("", False), ("bar.sync 0, 128;\n", True)):
        part = SimpleNamespace(
            handle=SimpleNamespace(asm={"ptx": summed.format(between)}), kernel=SimpleNamespace(entry="x")
        )
        compiled = SimpleNamespace(spills=0, device=job.device, parts=(part,))
        monkeypatch.setattr(crosscompile, "compile_kernel", lambda spec, config, device, found=compiled: found)
        passed, remark = crosscompile.compile_one(job)
        assert passed is right
        assert passed or "global_smem+8" in remark


@pytest.mark.parametrize("few", [False, True])
def test_every_job_has_a_config_that_its_family_declares(few: bool) -> None:
    rows = [*FAMILIES, *DECODE_FAMILIES]
    jobs = crosscompile_jobs.few_jobs(rows) if few else crosscompile_jobs.jobs(rows, list(crosscompile_jobs.TARGETS))
    for job in jobs:
        validate(job.config)
        assert invalid(job.config, job.spec, job.device) is None, f"{job.spec.key} on {job.device.arch}"
