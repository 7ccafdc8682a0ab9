"""`render`, `compile` and `explain`: they agree with each other and with the database."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.cli.arguments import parse_config, parse_shape
from flashgen.codegen.families import default_config, family
from flashgen.codegen.render import render_standalone
from flashgen.core.device import find_device
from flashgen.core.errors import ConfigError, WorkloadError
from flashgen.core.rungs import MEANINGS, RUNGS
from flashgen.core.settings import settings
from flashgen.db.store import Store
from tests.cli.conftest import Invoke
from tests.db.samples import CAUSAL, CONFIG, H200, MEASURED, OLD_CONFIG, WIDE
from tests.tiers import EXHAUSTIVE

SHAPE = "b4-h32-hk8-s4096-d128-causal"
SMALL = "portable_forward:block_m=64,block_n=32,num_warps=4,num_stages=2,loads=pointer"


def test_render_prints_the_kernel_that_would_serve(invoke: Invoke, tuned: Path) -> None:
    assert invoke("render", SHAPE, "--target", "h200").stdout == render_standalone(CAUSAL.specialization, CONFIG).text
    ampere = find_device("a100")
    default = render_standalone(CAUSAL.specialization, default_config(CAUSAL.specialization, ampere)).text
    assert invoke("render", SHAPE, "--target", "a100").stdout == default


def test_a_record_older_than_a_knob_serves(invoke: Invoke) -> None:
    """Written by hand, as a flashgen without the later knobs stored it."""
    path = settings().db_layers[0]
    with Store.open(path, validate=lambda config: config) as store:
        store.put_record(replace(MEASURED, config=OLD_CONFIG))
    explained = invoke("explain", SHAPE, "--target", "h200").stdout
    assert str(path) in explained
    assert str(CONFIG) in explained
    assert invoke("render", SHAPE, "--target", "h200").stdout == render_standalone(CAUSAL.specialization, CONFIG).text


def test_the_command_in_a_kernel_prints_that_kernel(invoke: Invoke) -> None:
    text = invoke("render", SHAPE, "--config", SMALL).stdout
    assert "BLOCK_M = tl.constexpr(64)" in text
    line = text.splitlines()[0].split("flashgen ")[1].split()
    again = invoke(*line)
    assert again.stdout == text
    assert again.stderr == ""  # the kernel is the same for every GPU, so there is nothing to note


def test_a_rendered_kernel_runs_without_flashgen(invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(invoke("render", SHAPE, "--config", SMALL).stdout)
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import kernel; assert 'flashgen' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ([SHAPE, "--config", "nobody:block_m=64"], "a kernel family is one of"),
        ([SHAPE, "--config", "portable_forwrd:block_m=64"], "did you mean portable_forward?"),
        ([SHAPE, "--config", "portable_forward:block_m=65"], "block_m of portable_forward is one of"),
        ([SHAPE, "--config", "portable_forward:loads=pointr"], "did you mean pointer?"),
        ([SHAPE, "--config", "portable_forward:block_m=__import__('os')"], "block_m of portable_forward is one of"),
        ([SHAPE, "--config", "portable_forward:colour=red"], "with each of"),
        ([SHAPE, "--config", "portable_forward:blockm=64"], "did you mean block_m?"),
        ([SHAPE, "--config", "portable_forward:block_m=64,block_m=64"], "with each of"),
        ([SHAPE, "--config", "portable_forward:block_m"], "at most once"),
        ([SHAPE, "--target", "abacus"], "a target is one of"),
        ([SHAPE, "--target", "rtx4091"], "did you mean rtx_4090?"),
        (["fwd-bf16-d128-causal"], "no sizes to look up"),
        (["b4-h32-s4096"], "a shape needs b, h, s"),
        (["b4-h32-s4096-d128-casual"], "did you mean causal?"),
        ([SHAPE, "--deterministic"], "--deterministic is about backward passes"),
        ([SHAPE, "--scattered"], "--scattered is about a bias or a mask, and fwd-bf16-d128-causal has none"),
    ],
)
def test_a_wrong_argument_is_one_line_with_its_rule(invoke: Invoke, arguments: list[str], rule: str) -> None:
    result = invoke("render", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert rule in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ([SHAPE, "--config", "portable_forward:loads=descriptor", "--target", "sm_86"], "cannot serve"),
        ([SHAPE + "-page16"], "it reads no paged keys"),
        ([SHAPE, "--unaligned", "--config", "portable_forward:loads=descriptor"], "multiples of 16 bytes"),
        ([SHAPE, "--unaligned", "--family", "hopper_forward", "--target", "h200"], "multiples of 16 bytes"),
        (["b1-h2-s64-d100", "--config", "portable_forward:loads=descriptor"], "multiples of 16 bytes"),
    ],
)
def test_what_no_kernel_does_is_an_error_and_no_wrong_usage(invoke: Invoke, arguments: list[str], rule: str) -> None:
    result = invoke("render", *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert rule in result.stderr


def test_compile_prints_what_the_kernel_takes(invoke: Invoke) -> None:
    result = invoke("compile", SHAPE, "--target", "sm_86", "--config", SMALL)
    assert result.exit_code == 0, result.stderr
    for text in ("NVIDIA RTX 3090 (sm86)", "block_m=64", "registers", "spills", "bytes a block", "an SM"):
        assert text in result.stdout


@EXHAUSTIVE
def test_compile_for_several_targets_as_json(invoke: Invoke) -> None:
    result = invoke("compile", SHAPE, "--target", "sm_86", "--target", "h100", "--config", SMALL, "--json")
    first, second = json.loads(result.stdout)
    assert (first["arch"], second["arch"]) == ("sm86", "sm90")
    for row in (first, second):
        assert row["spills_bytes"] == 0
        assert 32 <= row["registers"] <= 255
        assert 0 < row["shared_bytes"] <= 99 * 1024
        assert row["blocks_per_sm"] >= 1
    assert first["digest"] == second["digest"]


BACKWARD = "bwd-b1-h4-hk2-s512-d64-causal"
TWO_TILES = "block_m=32,block_n=64,num_warps=4,num_stages=2,dq_block_m=64,dq_block_n=32,dq_num_warps=4,dq_num_stages=2"


@EXHAUSTIVE
def test_compile_lists_every_kernel_of_a_backward_pass(invoke: Invoke) -> None:
    line = ("compile", BACKWARD, "--target", "a100", "--config", f"portable_backward_split:{TWO_TILES}")
    (facts,) = json.loads(invoke(*line, "--json").stdout)
    kernels = facts["kernels"]
    assert list(kernels) == [f"portable_backward_split_{name}" for name in ("prepare", "dkdv", "dq")]
    assert facts["shared_bytes"] == max(kernel["shared_bytes"] for kernel in kernels.values()) > 0
    assert facts["spills_bytes"] == max(kernel["spills_bytes"] for kernel in kernels.values())
    shown = invoke(*line)
    assert shown.exit_code == 0, shown.stderr
    assert "NVIDIA A100 (sm80)" in shown.stdout
    for name, kernel in kernels.items():
        row = next(text.split() for text in shown.stdout.splitlines() if text.startswith(f"{name} "))
        assert [int(cell) for cell in row[1:4]] == [kernel[k] for k in ("registers", "spills_bytes", "shared_bytes")]


def test_a_backward_kernel_prints_itself_again(invoke: Invoke) -> None:
    text = invoke("render", BACKWARD, "--target", "a100", "--deterministic").stdout
    line = text.splitlines()[0].split("flashgen ")[1].split()
    assert "portable_backward_split" in line[-1]
    assert invoke(*line).stdout == text


def test_explain_of_a_backward_pass_says_what_determinism_leaves_out(invoke: Invoke) -> None:
    plain, same_bits = (
        json.loads(invoke("explain", BACKWARD, "--target", "h100", "--json", *more).stdout)
        for more in ((), ("--deterministic",))
    )
    assert plain["workload"].startswith("bwd-")
    assert (plain["family"], same_bits["family"]) == ("hopper_backward_fused", "hopper_backward_split")
    assert same_bits["workload"] == plain["workload"] + "-deterministic"
    assert same_bits["features"] == ["causal", "deterministic"]
    assert plain["families"]["hopper_backward_fused"] is None
    assert "no fixed order" in same_bits["families"]["hopper_backward_fused"]
    assert "forward pass" in plain["families"]["hopper_forward"]


def test_explain_names_the_rung_and_the_record(invoke: Invoke, tuned: Path) -> None:
    shown = invoke("explain", SHAPE, "--target", "h200").stdout
    assert "3. user database, exact" in shown
    assert str(tuned) in shown
    assert str(CONFIG) in shown
    assert "portable_forward: applies" in shown
    facts = json.loads(invoke("explain", SHAPE, "--target", "h200", "--json").stdout)
    assert (facts["rung"], facts["layer"], facts["knobs"]) == (3, str(tuned), dict(CONFIG.knobs))


@pytest.mark.parametrize(
    ("shape", "is_copied"), [(SHAPE, True), ("b1-h4-s1024-d64", False), ("b4-h16-s4096-d36", True)]
)
def test_explain_says_where_unaligned_tensors_are_copied(invoke: Invoke, shape: str, is_copied: bool) -> None:
    facts = json.loads(invoke("explain", shape, "--target", "h200", "--unaligned", "--json").stdout)
    assert facts["copies"] == is_copied
    assert facts["specialization"].endswith("-unaligned") != is_copied
    assert ("kernels get copies" in invoke("explain", shape, "--target", "h200", "--unaligned").stdout) == is_copied


def test_heads_that_calls_pad_are_explained_as_they_serve(invoke: Invoke) -> None:
    """Without a flag; what is printed is for tensors as they are."""
    shape, padded = "b1-h32-s4096-d100-causal", "b1-h32-s4096-d104-causal"
    shown = invoke("explain", shape, "--target", "h200", "--json")
    facts, wider = json.loads(shown.stdout), json.loads(invoke("explain", padded, "--target", "h200", "--json").stdout)
    assert (facts.pop("copies"), wider.pop("copies")) == (True, False)
    assert facts == wider
    assert shown.stderr == ""
    small = json.loads(invoke("explain", "b1-h2-s128-d100-causal", "--target", "h200", "--json").stdout)
    assert (small["copies"], small["specialization"]) == (False, "fwd-bf16-d100-causal-unaligned")
    rendered = invoke("render", shape, "--target", "h200")
    assert "fwd-bf16-d100-causal-unaligned" in rendered.stdout.splitlines()[0]


def test_explain_says_when_sdpa_was_measured_faster(invoke: Invoke, tuned: Path) -> None:
    from dataclasses import replace

    from flashgen.core.record import Baseline
    from flashgen.db.store import Store
    from tests.db.samples import MEASURED

    assert json.loads(invoke("explain", SHAPE, "--target", "h200", "--json").stdout)["backend"] == "generated"
    with Store.open(tuned) as store:
        store.put_record(replace(MEASURED, baselines=(Baseline(impl="sdpa-cudnn", median_ms=1.0),)))
    assert json.loads(invoke("explain", SHAPE, "--target", "h200", "--json").stdout)["backend"] == "sdpa-cudnn"


def test_explain_says_what_a_rung_means_and_its_help_lists_all(invoke: Invoke, tuned: Path) -> None:
    assert RUNGS.keys() == MEANINGS.keys() == set(range(1, 9))
    assert f"3. user database, exact\n           {MEANINGS[3]}\n" in invoke("explain", SHAPE, "--target", "h200").stdout
    listed = " ".join(invoke("explain", "--help").stdout.split())
    for rung, name in RUNGS.items():
        assert f"{rung}. {name}: {MEANINGS[rung]}" in listed


def test_explain_without_records_says_default(invoke: Invoke) -> None:
    shown = invoke("explain", "b2-h16-s2048-d256", "--target", "rtx 3090").stdout
    assert "8. default config" in shown
    assert WIDE.key in shown


def test_explain_needs_sizes(invoke: Invoke) -> None:
    result = invoke("explain", "fwd-bf16-d128-causal")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "needs a workload with its sizes" in result.stderr


def test_shapes_are_workloads_or_specializations() -> None:
    assert parse_shape(SHAPE) == (CAUSAL, CAUSAL.specialization)
    workload, spec = parse_shape("fwd-bf16-d128-causal-unaligned-offset")
    assert workload is None
    assert (spec.aligned16, spec.offset_tensor, spec.causal) == (False, True, True)
    with pytest.raises(WorkloadError):
        parse_shape("fwd-bf16")


@pytest.mark.parametrize(
    ("shape", "unaligned", "scattered"),
    [
        ("b1-h2-s64-d64", False, False),
        ("b1-h2-s64-d100", True, False),
        ("fp32-b1-h2-s64-d100", False, False),
        ("b1-h2-s64-d17", True, False),
        ("b1-h2-s64-d64-dv60", True, False),
        ("b1-h2-sq64-sk77-d64-bias", False, True),
        ("b1-h2-sq64-sk77-d64-keybias", False, False),
        ("b2-h2-sq64-sk77-d64-keybias", False, True),
        ("b2-h2-sq64-sk88-d64-mask", False, True),
        ("fwd-bf16-d100-bias", True, False),
        ("bwd-b1-h2-s64-d100", True, False),
    ],
)
def test_rows_that_cannot_be_aligned_are_not_taken_to_be(
    invoke: Invoke, shape: str, unaligned: bool, scattered: bool
) -> None:
    _, spec = parse_shape(shape)
    assert (spec.aligned16, spec.aligned_scores) == (not unaligned, not scattered)
    config = (
        ("--config", "portable_forward:loads=pointer")
        if "bwd" not in shape
        else ("--family", "portable_backward_split")
    )
    shown = invoke("render", shape, "--target", "h100", *config)
    first = shown.stdout.splitlines()[0].split()
    assert first[5] == spec.key
    assert ("so this is about unaligned ones" in shown.stderr) is unaligned
    assert ("so this is about others" in shown.stderr) is scattered
    again = invoke(*first[4:])
    assert (again.stdout, again.stderr) == (shown.stdout, "")


@EXHAUSTIVE
def test_unaligned_and_scattered_are_asked_for_in_the_key_or_beside_it(invoke: Invoke) -> None:
    shape = "b1-h2-s64-d64-bias"
    for command in ("render", "compile", "explain"):
        shown = invoke(command, shape, "--target", "h100", "--unaligned", "--scattered")
        assert (shown.exit_code, shown.stderr) == (0, "")
    assert parse_shape(shape, unaligned=True)[1].key == "fwd-bf16-d64-bias-unaligned"
    assert parse_shape(shape, scattered=True)[1].key == "fwd-bf16-d64-bias-scattered"
    key = "fwd-bf16-d64-bias-unaligned-scattered"
    assert parse_shape(shape, unaligned=True, scattered=True)[1] == parse_shape(key)[1]
    explained = invoke("explain", "b1-h2-sq56-sk64-d64-bias", "--target", "h100", "--unaligned").stdout
    assert "TMA needs pointers and strides that are multiples of 16 bytes" in explained


def test_a_config_for_another_gpu_is_printed_for_any_alignment(invoke: Invoke) -> None:
    """Only the alignment is checked where no GPU is named: the text is the same for all."""
    config = "portable_forward:block_m=128,block_n=32,num_warps=4,num_stages=1,loads=pointer"
    first = invoke("render", SHAPE, "--unaligned", "--target", "mi300x", "--config", config)
    assert first.exit_code == 0, first.stderr
    assert "128-causal-unaligned" in first.stdout.splitlines()[0]
    assert invoke(*first.stdout.splitlines()[0].split()[4:]).stdout == first.stdout


def test_determinism_is_asked_for_in_the_key_or_beside_it() -> None:
    for text in ("bwd-b1-h2-s64-d64", "bwd-bf16-d64"):
        beside, named = parse_shape(text, deterministic=True), parse_shape(f"{text}-deterministic")
        assert beside == named == parse_shape(f"{text}-deterministic", deterministic=True)
        assert named[1].deterministic
        assert not parse_shape(text)[1].deterministic


def test_a_backward_pass_with_a_bias_is_meant_with_its_gradient(invoke: Invoke) -> None:
    for text, there in (("bwd-b1-h2-s64-d64-bias", True), ("bwd-b1-h2-s64-d64", False), ("b1-h2-s64-d64-bias", False)):
        assert parse_shape(text)[1].bias_grad is there
    assert "def portable_backward_fused_dbias(" in invoke("render", "bwd-b1-h2-s64-d64-bias", "--target", "a100").stdout


def test_a_config_is_read_back_from_its_text() -> None:
    knobs = ",".join(f"{name}={value}" for name, value in CONFIG.knobs)
    assert parse_config(f"portable_forward:{knobs}", CAUSAL.specialization, H200) == CONFIG
    partial = parse_config("portable_forward:num_stages=2", CAUSAL.specialization, H200)
    assert partial == family("portable_forward").default(CAUSAL.specialization, H200).replace(num_stages=2)
    with pytest.raises(ConfigError):
        parse_config("", CAUSAL.specialization, H200)


@EXHAUSTIVE
def test_a_family_is_rendered_and_compiled_with_its_default(invoke: Invoke, tuned: Path) -> None:
    spec, h200 = CAUSAL.specialization, find_device("h200")
    portable = family("portable_forward").default(spec, h200)
    assert (
        invoke("render", SHAPE, "--target", "h200", "--family", portable.family).stdout
        == render_standalone(spec, portable).text
    )
    key = invoke("render", spec.key, "--target", "h200", "--family", portable.family)
    assert key.stdout == render_standalone(spec, portable).text
    compiled = invoke("compile", SHAPE, "--target", "a100", "--family", portable.family, "--json")
    assert json.loads(compiled.stdout)[0]["family"] == portable.family


def test_a_family_is_rendered_as_it_is_best_at_the_sizes_of_a_workload(invoke: Invoke) -> None:
    text = invoke(
        "render", "b8-h32-hk8-sq1-sk4096-d128-causal", "--target", "h200", "--family", "hopper_forward"
    ).stdout
    assert "packed_heads=4" in text.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--family", "hopper_sideways"), 2, "a kernel family is one of"),
        (("--family", "portable_forward", "--config", SMALL), 2, "not both"),
        (("--family", "hopper_forward", "--target", "a100"), 1, "it needs sm90, not sm80"),
        (("--family", "portable_backward_split", "--target", "a100"), 1, "it computes the backward pass"),
    ],
)
def test_a_family_that_cannot_be_rendered_is_refused(
    invoke: Invoke, arguments: tuple[str, ...], code: int, words: str
) -> None:
    result = invoke("render", SHAPE, *arguments)
    assert result.exit_code == code
    assert words in result.stderr
