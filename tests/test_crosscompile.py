"""What `scripts/crosscompile.py` lets pass of spilled registers, and that it says so."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import triton

from flashgen.codegen.families import DECODE_FAMILIES, FAMILIES, invalid, validate
from flashgen.codegen.family import KernelFamily
from flashgen.codegen.render import render
from flashgen.core.device import find_device
from flashgen.core.errors import BuildError
from flashgen.core.workload import Specialization
from scripts import crosscompile, crosscompile_jobs, triton_ir
from scripts.crosscompile_jobs import Job
from tests.tiers import first

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


@pytest.mark.parametrize("few", [False, True])
def test_the_brief_jobs_are_a_plain_one_and_one_with_features_of_every_family(few: bool) -> None:
    rows = [*FAMILIES, *DECODE_FAMILIES]
    every = crosscompile_jobs.few_jobs(rows) if few else crosscompile_jobs.jobs(rows, list(crosscompile_jobs.TARGETS))
    brief = crosscompile_jobs.brief(every)
    assert all(replace(job, to_machine_code=True) in every for job in brief)
    found = [job for job in brief if job.spec.mods is None]
    assert sorted(job.config.family for job in found) == sorted(2 * [row.id for row in rows])
    whole = [job for job in found if job.to_machine_code]
    assert {job.config.family for job in whole} == {row.id for row in rows}
    assert {job.config.family for job in whole if not job.may_spill} >= {row.id for row in FAMILIES}
    for row in FAMILIES:
        words = {name for job in found if job.config.family == row.id for name in job.spec.key.split("-")[3:]}
        assert len(words) >= 3, f"of {row.id} those with {words}"
    functions = [job for job in brief if job.spec.mods is not None]
    assert [replace(job, to_machine_code=True) for job in functions] == [job for job in every if job.spec.mods]
    assert not any(job.to_machine_code for job in functions)


@pytest.mark.parametrize(("family", "kernels"), first(1, [("hopper_forward", 1), ("portable_backward_split", 3)]))
def test_a_text_is_accepted_without_machine_code(
    family: str, kernels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    row, h200 = next(row for row in FAMILIES if row.id == family), find_device("h200")
    spec = Specialization.parse("fwd-bf16-d64" if row.direction == "forward" else "bwd-bf16-d64")
    job = Job(spec=spec, config=row.default(spec, h200), device=h200, may_spill=False, to_machine_code=False)
    assert crosscompile.compile_one(job) == (True, "")
    made = [path.suffix for path in tmp_path.rglob("*") if path.is_file()]
    assert made.count(".ttgir") == kernels
    assert not {".llir", ".ptx", ".cubin"} & set(made)
    assert triton.knobs.runtime.add_stages_inspection_hook is None


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("tl.dot(", "tl.dot_of_another_version("), ("tl.zeros([BLOCK_M]", "tl.zeros([BLOCK_M + 1]")],
)
def test_a_text_that_triton_does_not_know_fails(right: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Specialization.parse("fwd-bf16-d64")
    row = next(row for row in FAMILIES if row.id == "portable_forward")
    job = Job(spec=spec, config=row.default(spec, GFX1200), device=GFX1200, may_spill=False, to_machine_code=False)
    source = render(spec, job.config)
    assert right in source.text
    other = replace(source, text=source.text.replace(right, wrong))
    monkeypatch.setattr(triton_ir, "render", lambda *_: other)
    with pytest.raises(BuildError, match="does not accept"):
        triton_ir.accept(spec, job.config, GFX1200)
    passed, remark = crosscompile.compile_one(job)
    assert not passed
    assert "does not accept portable_forward" in remark
