"""What the look-up ladder may never do, over random workloads: fail, or pass over the nearest record."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from flashgen.codegen.families import default_config, invalid, usual, validate
from flashgen.codegen.family import Sizes
from flashgen.core.device import CATALOGUE, Device
from flashgen.core.nearest import distance, position
from flashgen.core.workload import Specialization, Workload
from flashgen.runtime.lookup.by_sizes import SizesLookup
from flashgen.runtime.lookup.ladder import ELSEWHERE_STEPS, resolve
from flashgen.runtime.lookup.records import Records
from tests.db.samples import H100, H200
from tests.runtime.ladders import CAUSAL, Ladder, config, measured, predicted

lengths = st.one_of(st.integers(0, 300), st.integers(1, 17).map(lambda n: 1 << n), st.integers(1, 200_000))
heads = st.tuples(st.sampled_from([1, 2, 3, 8, 16]), st.sampled_from([1, 2, 4, 7, 32]))


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, int]:
    nheads_k, group = draw(heads)
    sizes = {"seqlen_q": draw(lengths), "seqlen_k": draw(lengths), "batch": draw(st.integers(0, 64))}
    return {**sizes, "nheads_k": nheads_k, "nheads": nheads_k * group}


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """A user's database of 40 random shapes, measured on two devices, and some predictions."""
    folder = tmp_path_factory.mktemp("crowd")
    generator = random.Random(1)
    ladder = Ladder(user_path=folder / "user.sqlite3", shipped_folder=folder)
    for number in range(40):
        nheads_k = generator.choice([1, 2, 8])
        shape = CAUSAL.with_shape(
            batch=generator.choice([1, 2, 16]),
            nheads=nheads_k * generator.choice([1, 4, 8]),
            nheads_k=nheads_k,
            seqlen_q=generator.randint(1, 20_000),
            seqlen_k=generator.randint(1, 20_000),
        )
        loads = generator.choice(["pointer", "descriptor"])
        kind = predicted if number % 4 == 3 else measured
        ladder.user(kind(shape, H100 if number % 2 else H200, config=config(generator.choice([0, 1, 8, 32]), loads)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flashgen.db.layers.shipped", lambda name: folder / "none")
        return ladder.records()


@given(shape=shapes(), device=st.sampled_from([H200, H100]), aligned=st.booleans())
def test_the_record_that_serves_is_the_nearest_of_its_rung(
    crowd: Records, shape: dict[str, int], device: Device, aligned: bool
) -> None:
    workload = CAUSAL.with_shape(**shape)
    spec = Specialization.of(workload, aligned16=aligned)
    served = resolve(workload, spec, device, crowd)
    assert served.record is not None
    assert served.rung in (3, 5, 6)
    choices, sizes = crowd.choices(spec, device), Sizes.of(workload).in_blocks()
    # tiles that won with few programs over the Hopper family serve no sizes with many
    poor = {one.key for one in (*choices.here, *choices.elsewhere) if one.why_poor(sizes) is not None}
    usable = [
        record
        for record, _ in crowd.of(spec, device)
        if record.provenance == "measured"
        and (aligned or record.config["loads"] == "pointer")
        and (record.workload == workload or record.workload.key not in poor)
    ]
    assert served.record in usable
    far = [
        (distance(position(workload), position(record.workload)) + (record.device != device) * ELSEWHERE_STEPS)
        for record in usable
    ]
    assert far[usable.index(served.record)] == min(far)
    assert (served.rung == 6) == (served.record.device != device)
    assert served == resolve(workload, spec, device, crowd), "ties are broken in one way only"
    if min(shape.values()) and served.rung != 3:
        by_sizes = SizesLookup(crowd.choices(spec, device), workload, spec, device, crowd)
        found = by_sizes.config(Sizes.of(workload), generated_only=True, has_own_offset=True)
        assert found == served.config, "as every new length is"


@examples(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    shape=shapes(),
    dtype=st.sampled_from(["bf16", "fp16", "fp32"]),
    dims=st.tuples(st.integers(16, 256), st.integers(16, 256)) | st.sampled_from([(64, 64), (128, 128), (256, 256)]),
    causal=st.booleans(),
    aligned=st.booleans(),
    offset_tensor=st.booleans(),
    device=st.sampled_from(CATALOGUE),
)
def test_the_ladder_never_fails_on_a_workload_that_a_family_supports(
    crowd: Records,
    shape: dict[str, int],
    dtype: str,
    dims: tuple[int, int],
    causal: bool,
    aligned: bool,
    offset_tensor: bool,
    device: Device,
) -> None:
    workload = Workload(dtype=dtype, head_dim=dims[0], head_dim_v=dims[1], causal=causal, **shape)
    spec = Specialization.of(workload, aligned16=aligned, offset_tensor=causal and offset_tensor)
    served = resolve(workload, spec, device, crowd)
    assert invalid(validate(served.config), spec, device) is None
    safe = usual(default_config(spec, device), spec, Sizes.of(workload), device)
    assert served.config == safe or served.record is not None
