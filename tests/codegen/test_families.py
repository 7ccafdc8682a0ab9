"""The families table and the search space: what is declared is checked, what cannot work is not offered."""

from __future__ import annotations

import random

import pytest

from flashgen.codegen.common_groups import HEADS_PER_TILE
from flashgen.codegen.families import FAMILIES, applicable, default_config, family, invalid, reasons, validate
from flashgen.codegen.family import KernelFamily
from flashgen.codegen.head_parts import head_parts
from flashgen.codegen.key_splits import SPLIT_KEYS
from flashgen.codegen.portable_forward.family import PORTABLE_FORWARD
from flashgen.codegen.portable_forward.resources import registers_needed, smem_needed
from flashgen.codegen.space import search_space
from flashgen.core.config import Config
from flashgen.core.device import Device, find_device
from flashgen.core.errors import ConfigError, UnsupportedError
from flashgen.core.workload import Specialization
from tests.codegen.devices import ONE_OF_EACH_KIND
from tests.codegen.spaces import some_of

KEYS = (
    "fwd-bf16-d64",
    "fwd-fp16-d128-causal",
    "fwd-bf16-d256-causal",
    "fwd-fp32-d64",
    "fwd-bf16-d80-unaligned",
    "fwd-bf16-d512",
    "fwd-fp16-d192-dv128-causal-window-softcap",
    "fwd-bf16-d64-sink-bias-mask",
)


def test_ids_are_unique_and_permanent() -> None:
    ids = [row.id for row in FAMILIES]
    assert len(set(ids)) == len(ids)
    stored = [  # databases name them: they may never change, nor may one be preferred to another that was before it
        "hopper_forward",
        "portable_forward",
        "hopper_backward_fused",
        "hopper_backward_split",
        "portable_backward_fused",
        "portable_backward_split",
    ]
    assert [name for name in ids if name in stored] == stored


@pytest.mark.parametrize(
    ("key", "device", "family_id"),
    [
        ("fwd-bf16-d128-causal", "h200", "hopper_forward"),
        ("fwd-fp16-d64-keymask-sink", "h100", "hopper_forward"),
        ("fwd-bf16-d128-mask-scattered", "h200", "portable_forward"),
        ("fwd-fp32-d64", "h200", "portable_forward"),
        ("fwd-bf16-d128-causal", "a100", "portable_forward"),
        ("fwd-bf16-d128-causal", "b200", "portable_forward"),
    ],
)
def test_a_default_is_that_of_the_fastest_family_that_applies(key: str, device: str, family_id: str) -> None:
    assert default_config(Specialization.parse(key), find_device(device)).family == family_id


@pytest.mark.parametrize(
    ("key", "named", "rule"),
    [
        ("fwd-bf16-d64", "portable_decode", "it computes the decode pass, not forward"),
        ("fwd-bf16-d64", "portable_backward_fused", "it computes the backward pass, not forward"),
        ("dec-bf16-d64", "portable_forward", "it computes the forward pass, not decode"),
        ("fwd-fp32-d64", "hopper_forward", "16"),
    ],
)
def test_a_family_that_is_named_and_does_not_serve_has_its_reason(key: str, named: str, rule: str) -> None:
    device = find_device("h200")
    with pytest.raises(UnsupportedError, match=rf"^no kernel family that is named serves .*: {named}: .*{rule}"):
        applicable(Specialization.parse(key), device, [named])
    assert applicable(Specialization.parse(key), device)


@pytest.mark.parametrize("device", ONE_OF_EACH_KIND, ids=lambda device: device.slug)
@pytest.mark.parametrize("key", KEYS)
def test_every_default_is_valid(key: str, device: Device) -> None:
    spec = Specialization.parse(key)
    config = default_config(spec, device)
    assert validate(config) is config
    assert invalid(config, spec, device) is None
    generator = random.Random(0)
    assert len(some_of(family(config.family), spec, device, 20, generator)) == 20, "there is something to search"


@pytest.mark.parametrize(
    ("key", "device"),
    # an enumeration knows of a device what `invalid` says: each key meets two, and each device two keys
    [
        pytest.param(key, device, id=f"{key}-{device.slug}")
        for one, key in enumerate(KEYS)
        for other, device in enumerate(ONE_OF_EACH_KIND)
        if (one - other) % 4 == 0
    ],
)
def test_every_config_of_a_space_is_valid_and_there_once(key: str, device: Device) -> None:
    spec = Specialization.parse(key)
    config = default_config(spec, device)
    space = search_space(family(config.family), spec, device)
    assert space[0] == config
    assert len(set(space)) == len(space) > 20
    assert set(some_of(family(config.family), spec, device, 20, random.Random(0))) <= set(space)
    # what a space is filtered by: of thousands of configs some hundreds tell as much
    for each in random.Random(0).sample(space, min(len(space), 300)):
        assert validate(each) is each
        assert each == each.replace(), "knobs in the order of every config"
        assert invalid(each, spec, device) is None


@pytest.mark.parametrize("row", [row for row in FAMILIES if row.id.startswith("portable")], ids=lambda row: row.id)
@pytest.mark.parametrize("key", ["d64", "d128-causal", "d80-unaligned", "d192-dv128-causal-window", "d512"])
def test_values_that_are_not_enumerated_are_never_valid(row: KernelFamily, key: str) -> None:
    spec = Specialization.parse(f"{row.direction[0]}wd-bf16-{key}")
    for device in ONE_OF_EACH_KIND:
        default = row.default(spec, device)
        left_out = [
            default.replace(**{knob.name: value})
            for knob in row.knobs
            for value in knob.values
            if value not in row.allowed_values(spec).get(knob.name, knob.values)
            and knob.name not in (HEADS_PER_TILE.name, SPLIT_KEYS.name)  # which follow from sizes
        ]
        other_dtypes = [config for config in left_out if config["products"] != default["products"]]
        softcaps = [config for config in left_out if config.get("tanh", "exact") != "exact"]
        pages = [config for config in left_out if config.get("page_ids", "load") != "load"]
        assert (len(other_dtypes), len(softcaps), len(pages)) == (2, *[spec.direction == "forward"] * 2)
        assert (len(left_out) > 2 + len(softcaps) + len(pages)) is (key != "d192-dv128-causal-window")
        assert all(invalid(config, spec, device) is not None for config in left_out)


def test_a_consumer_card_gets_a_space_of_its_own() -> None:
    spec = Specialization.parse("fwd-bf16-d128-causal")
    big, small = (set(search_space(PORTABLE_FORWARD, spec, find_device(name))) for name in ("h200", "rtx 4090"))
    assert PORTABLE_FORWARD.default(spec, find_device("h200")) not in small
    assert all(smem_needed(spec, config, find_device("4090")) <= 99 * 1024 for config in small)
    assert all(config["loads"] == "pointer" for config in small)
    assert any(config["loads"] == "descriptor" for config in big)


def test_restrictions_name_their_reason() -> None:
    spec, device = Specialization.parse("fwd-bf16-d256"), find_device("h200")
    config = PORTABLE_FORWARD.default(spec, device)
    assert "shared memory" in str(invalid(config.replace(num_stages=5, block_n=64), spec, device))
    assert "registers" in str(invalid(config.replace(block_m=256), spec, device))
    assert "causal" in str(invalid(config.replace(heavy_first=True), spec, device))
    assert "multiples of 16 bytes" in str(invalid(config, Specialization.parse("fwd-bf16-d256-unaligned"), device))
    assert registers_needed(spec, config, device) <= 255


@pytest.mark.parametrize(
    "change",
    [
        {"block_m": 48},
        {"block_m": True},
        {"block_m": "128"},
        {"loads": "__import__('os')"},
        {"num_warps": 10**30},
        {"heavy_first": 1},
        {"unheard_of": 1},
    ],
)
def test_only_declared_values_pass(change: dict[str, object]) -> None:
    spec, device = Specialization.parse("fwd-bf16-d64"), find_device("h200")
    config = PORTABLE_FORWARD.default(spec, device).replace(**change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        validate(config)


def test_missing_knobs_repeated_knobs_and_unknown_families_are_refused() -> None:
    config = PORTABLE_FORWARD.default(Specialization.parse("fwd-bf16-d64"), find_device("h200"))
    for wrong in (
        Config(family=config.family, knobs=config.knobs[1:]),
        Config(family=config.family, knobs=(*config.knobs, config.knobs[0])),
        Config(family="nobody", knobs=config.knobs),
    ):
        with pytest.raises(ConfigError):
            validate(wrong)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("fwd-bf16-d64-varlen-bias", "no bias and no mask"),
        ("fwd-bf16-d64-varlen-causal-offset", "follow from their lengths"),
        ("fwd-bf16-d528", "16 to 512, not 528"),
        ("fwd-bf16-d64-page16", "paged"),
        ("bwd-bf16-d64-page16", "forward pass, not backward"),
    ],
)
def test_not_applicable_is_an_answer_with_a_reason(key: str, reason: str) -> None:
    spec, device = Specialization.parse(key), find_device("h200")
    assert reason in str(reasons(spec, device)["portable_forward"])
    with pytest.raises(UnsupportedError, match=r"portable_forward: .*" + reason.replace("(", r"\(")):
        applicable(spec, device)
    assert search_space(PORTABLE_FORWARD, spec, device) == ()


@pytest.mark.parametrize(
    ("key", "columns"), [("d192", 192), ("d80", 80), ("d72", 80), ("d96", 96), ("d160", 160), ("d512", 512)]
)
def test_two_parts_of_a_head_need_less_than_one_padded_tile(key: str, columns: int) -> None:
    spec, device = Specialization.parse(f"fwd-bf16-{key}"), find_device("h200")
    config = PORTABLE_FORWARD.default(spec, device).replace(split_d=True)
    assert invalid(config, spec, device) is None
    assert sum(part.block for part in head_parts(spec.head_dim, True)) == columns
    assert smem_needed(spec, config, device) <= smem_needed(spec, config.replace(split_d=False), device)


@pytest.mark.parametrize("key", ["d64", "d128", "d256", "d120", "d48-dv128", "d16"])
def test_splitting_is_refused_where_it_makes_no_difference(key: str) -> None:
    spec, device = Specialization.parse(f"fwd-bf16-{key}"), find_device("h200")
    expected = "no smaller in two parts" if key != "d48-dv128" else "None"
    assert expected in str(invalid(PORTABLE_FORWARD.default(spec, device).replace(split_d=True), spec, device))


def test_a_config_that_is_older_than_the_knob_splits_nothing() -> None:
    spec, device = Specialization.parse("fwd-bf16-d192"), find_device("h200")
    config = PORTABLE_FORWARD.default(spec, device)
    older = Config.of(config.family, {name: value for name, value in config.knobs if name != "split_d"})
    assert validate(older) == config
    assert invalid(older, spec, device) is None


def test_tf32_needs_a_unit_that_multiplies_it() -> None:
    spec = Specialization.parse("fwd-tf32-d64")
    assert "TF32" in str(reasons(spec, find_device("gfx1200"))["portable_forward"])
    assert reasons(spec, find_device("gfx942"))["portable_forward"] is None
