"""The derivative of a score_mod by what it loads: its source, and what is refused by name and line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashgen.codegen.aux_gradient import aux_gradient_sources, why_no_aux_gradient
from flashgen.codegen.families import applicable, default_config
from flashgen.codegen.render import render
from flashgen.core.device import find_device
from flashgen.core.errors import UnsupportedError
from flashgen.core.score_mods import ScoreMods, UserFunction
from flashgen.core.workload import Specialization

H200 = find_device("h200")


def function(*lines: str, aux: str = "table") -> UserFunction:
    body = "".join(f"    {line}\n" for line in lines)
    return UserFunction(name="score_mod", source=f"def score_mod(score, b, h, q_idx, k_idx, {aux}):\n{body}")


def last_lines(*lines: str, aux: str = "table", numbers: tuple[int, ...] = (0,)) -> list[str]:
    return [source.splitlines()[-1].strip() for source in aux_gradient_sources(function(*lines, aux=aux), numbers)]


def test_each_load_has_a_function_that_adds_where_it_reads() -> None:
    (source,) = aux_gradient_sources(function("return score + tl.load(table + h * 9 + k_idx - q_idx)"), (0,))
    assert source == (
        "def score_mod_aux_bwd0(grad, score, b, h, q_idx, k_idx, table, dtable, seen):\n"
        "    place0 = dtable + h * 9 + k_idx - q_idx\n"
        "    loaded0 = tl.load(table + h * 9 + k_idx - q_idx)\n"
        "    _add_to_aux(place0, grad, seen)\n"
    )
    assert last_lines("x = tl.load(table + h)", "return score * x + tl.load(1 + table)") == [
        "_add_to_aux(place0, grad * score, seen)",
        "_add_to_aux(place1, grad, seen)",
    ]


def test_loads_that_change_no_score_have_none() -> None:
    assert last_lines("return score") == []
    assert last_lines("return tl.where(tl.load(table + h) > 0.0, score, 0.0)") == []
    both = ("x = tl.load(one + h) + tl.load(two + h)", "return score + x")
    assert len(last_lines(*both, aux="one, two", numbers=(1,))) == 1


def test_names_of_the_function_are_left_alone() -> None:
    lines = ("dtable = 3.0", "loaded0 = dtable * score", "seen = tl.load(table + h)", "return loaded0 + seen")
    assert last_lines(*lines) == ["_add_to_aux(place0, grad, seen1)"]


def test_a_masked_load_adds_where_it_reads_alone() -> None:
    assert last_lines("return score + tl.load(table + k_idx, mask=k_idx < 3, other=0.0)") == [
        "_add_to_some_aux(place0, grad, seen & shown0)"
    ]


@pytest.mark.parametrize(
    ("lines", "operation", "line"),
    [
        (("return score + tl.sin(tl.load(table + h))",), "tl.sin", 2),
        (("x = 1.0", "x *= tl.floor(tl.load(table + h))", "return score * x"), "tl.floor", 3),
        (("if h > 1:", "    score += tl.load(table + h)", "return score"), "if", 2),
        (("p, q = (table, 1)", "return score + tl.load(p)"), "other uses than tl.load", 2),
        (("return score + tl.sum(table)",), "other uses than tl.load", 2),
        (("return score + tl.load(tl.where(h > 0, table, table + 1))",), "tl.load from no sum", 2),
        (("return score + tl.load(table + h, boundary_check=(0,))",), "boundary_check", 2),
        (("x = tl.load(table + tl.load(table + h).to(tl.int32))", "return score + x"), r"to\(tl.int32\)", 2),
        (("x = tl.load(table + h)", "table = ids", "return score + x"), "an assignment to table", 3),
    ],
)
def test_what_is_not_derived_is_named_with_its_line(lines: tuple[str, ...], operation: str, line: int) -> None:
    with pytest.raises(UnsupportedError, match=rf"{operation}.* an aux tensor .*in line {line} of the score_mod"):
        aux_gradient_sources(function(*lines), (0,))


def spec_of(*lines: str, key: str = "bwd-bf16-d64-causal", numbers: tuple[int, ...] = (0,)) -> Specialization:
    mods = ScoreMods(score_mod=function(*lines), aux=("fp32",), aux_grads=numbers)
    return replace(Specialization.parse(key), mods=mods)


def test_only_calls_whose_sums_may_come_in_any_order_have_them() -> None:
    bias = "return score + tl.load(table + k_idx)"
    assert {row.id for row in applicable(spec_of(bias), H200)} == {
        "portable_backward_fused",
        "portable_backward_split",
    }
    with pytest.raises(UnsupportedError, match="summed in the order of their arrival"):
        applicable(spec_of(bias, key="bwd-bf16-d64-causal-deterministic"), H200)
    with pytest.raises(UnsupportedError, match=r"tl\.sin"):
        applicable(spec_of("return score + tl.sin(tl.load(table + h))"), H200)
    assert why_no_aux_gradient(function(bias), (0,)) is None


def test_a_kernel_without_them_is_what_it_was() -> None:
    bias = "return score + tl.load(table + k_idx)"
    plain, learned = (spec_of(bias, numbers=numbers) for numbers in ((), (0,)))
    # on Hopper families of its own serve a function whose tensors have no gradient
    assert default_config(plain, H200).family.startswith("hopper")
    config = default_config(learned, H200)
    assert config.family.startswith("portable")
    texts = [render(spec, config).text for spec in (plain, learned)]
    assert "aux_bwd" not in texts[0]
    assert "DAux" not in texts[0]
    assert texts[1].count("score_mod_aux_bwd0(") == 2
    assert (plain.key + "-daux0", plain.workload_class) == (learned.key, learned.workload_class)
