"""An enumeration asks rules about many configs at once: nothing else comes of it than of asking about each."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import pytest

from flashgen.codegen.families import family
from flashgen.codegen.family import KernelFamily
from flashgen.codegen.space import search_space
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.errors import ConfigError
from flashgen.core.workload import Specialization

H200 = find_device("h200")
SMALL = Specialization.parse("bwd-bf16-d128-causal")


def one_by_one(row: KernelFamily, spec: Specialization) -> Iterator[Config]:
    """All configs that are declared for a specialization, valid or not, in the order of knobs."""
    allowed, together = row.allowed_values(spec), row.knob_rows()
    for values in itertools.product(*(allowed.get(knob.name, knob.values) for knob in row.knobs)):
        config = Config.of(row.id, dict(zip([knob.name for knob in row.knobs], values, strict=True)))
        if tuple(config[name] for name in together.names) in together.rows:
            yield config


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("hopper_backward_split", "bwd-bf16-d128-causal"),
        ("hopper_backward_fused", "bwd-bf16-d64-window"),
        ("portable_backward_fused", "bwd-bf16-d96-causal"),
        ("portable_forward", "fwd-fp16-d64"),
    ],
)
def test_an_enumeration_finds_what_is_valid_in_the_order_of_knobs(name: str, key: str) -> None:
    row, spec = family(name), Specialization.parse(key)
    default = row.default(spec, H200)
    valid = [config for config in one_by_one(row, spec) if row.invalid(spec, config, H200) is None]
    assert search_space(row, spec, H200) == (default, *(config for config in valid if config != default))


def _by_all_knobs(config: Config) -> bool:
    return dict(config.knobs)["block_m"] == 64


def _by_what_it_is_replaced_by(config: Config) -> bool:
    return config.replace(block_n=128).replace(block_n=64)["block_n"] == 64 and config.integer("block_m") == 64


def _by_what_it_has_not(config: Config) -> bool:
    with pytest.raises(ConfigError, match="not 'colour'"):
        config["colour"]
    return config.get("colour", "none") == "none" and config.get("block_m", 0) == 64


def _by_what_a_change_leaves(config: Config) -> bool:
    return config.replace(heads_per_group=3).integer("block_m") == 64


@pytest.mark.parametrize(
    "rule", [_by_all_knobs, _by_what_it_is_replaced_by, _by_what_it_has_not, _by_what_a_change_leaves]
)
def test_a_rule_may_look_at_a_config_in_any_way(rule: Callable[[Config], bool]) -> None:
    row = dataclasses.replace(
        family("portable_backward_fused"),
        invalid=lambda spec, config, device: None if rule(config) else "it is none of those",
    )
    wanted = {config for config in one_by_one(row, SMALL) if config["block_m"] == 64}
    assert set(search_space(row, SMALL, H200)) - {row.default(SMALL, H200)} == wanted - {row.default(SMALL, H200)}
    assert len(wanted) > 20


def test_a_rule_is_asked_once_for_configs_that_it_cannot_tell_apart() -> None:
    asked: list[Config] = []

    def invalid(spec: Specialization, config: Config, device: object) -> str | None:
        asked.append(config)
        return None if config["block_m"] == 64 or config["num_warps"] == 4 else "eight warps"

    row = dataclasses.replace(family("portable_backward_fused"), invalid=invalid)
    knobs = {knob.name: len(knob.values) for knob in row.knobs}
    assert len(search_space(row, SMALL, H200)) > 20
    assert len(asked) == 1 + (knobs["block_m"] - 1) * knobs["num_warps"]
