"""Numerics of the score features where they may go wrong, in Triton's interpreter, against a dense float64 formula.

`test_covering` has pairs of all features; here are the corners of each: keys and values that no query sees hold NaN or
infinity, sinks that dominate, scores far beyond any big number, rows that see nothing, offsets beyond the lengths.
"""

from __future__ import annotations

import math

import pytest
import torch

from flashgen.codegen.generated import load_module
from flashgen.codegen.render import render_standalone
from flashgen.core.workload import Specialization
from tests.interpreter.dense import Rules, attention
from tests.interpreter.forward import compare, config_for, run, tensors
from tests.tiers import every, first

LOADS = pytest.mark.parametrize("loads", ["descriptor", "pointer"])


def check(key: str, shape: tuple[int, ...], loads: str, rules: Rules, *, split: bool = False, **host: object) -> None:
    """Run the kernel of a specialization on random tensors and compare it with the dense formula."""
    spec = Specialization.parse(key)
    dtype = torch.float16 if spec.dtype == "fp16" else torch.float32
    q, k, v = tensors(shape, spec.head_dim, spec.head_dim_v, dtype, "bshd")
    got = run(spec, config_for(spec, loads=loads, split_d=split), q, k, v, **host)
    compare(got, attention(q, k, v, rules))


WINDOWS = ((0, 0), (5, 0), (0, 7), (31, 33), (64, None), (None, 3), (None, None))
OFFSETS = (None, -25, 0, 200)


@pytest.mark.parametrize(("number", "window"), list(enumerate(WINDOWS)))
@pytest.mark.parametrize(("place", "offset"), list(enumerate(OFFSETS)))
def test_windows(number: int, window: tuple[int | None, int | None], place: int, offset: int | None) -> None:
    """Every window with every offset, and each of both with both kinds of loads."""
    loads = ("descriptor", "pointer")[(number + place) % 2]
    rules = Rules(window=window, q_offset=offset)
    check("fwd-fp16-d16-window", (1, 2, 1, 70, 150), loads, rules, window=window, q_offset=offset)


@LOADS
@pytest.mark.parametrize("key", ["fwd-fp16-d32-causal-window", "fwd-fp32-d32-causal-window-alibi"])
def test_a_causal_mask_is_the_right_edge_of_a_window(loads: str, key: str) -> None:
    slopes = torch.tensor([0.5, 0.25])
    alibi = {"alibi_slopes": slopes} if "alibi" in key else {}
    rules = Rules(causal=True, window=(40, None), **alibi)
    check(key, (2, 2, 1, 70, 150), loads, rules, window=(40, None), **alibi)


@pytest.mark.parametrize("cap", [0.5, 20.0])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")  # to infinity, whose inverse is 0
def test_softcap_is_exact_near_zero_and_far_from_it(dtype: str, cap: float) -> None:
    for scale in (1e-4, 1.0, 30.0):
        rules = Rules(softcap=cap, softmax_scale=scale)
        check(f"fwd-{dtype}-d32-softcap", (1, 2, 2, 40, 50), "pointer", rules, softcap=cap, softmax_scale=scale)


@LOADS
@pytest.mark.parametrize(
    "head_dims",
    every(3, map(pytest.param, [(80, 80), (72, 72), (96, 96), (160, 160), (192, 128), (512, 512), (64, 96)])),
)
def test_heads_in_two_parts(loads: str, head_dims: tuple[int, int]) -> None:
    key = f"fwd-fp16-d{head_dims[0]}-dv{head_dims[1]}-causal"
    check(key, (1, 2, 1, 40, 50), loads, Rules(causal=True), split=True)


@LOADS
@pytest.mark.parametrize("garbage", first(1, [math.nan, math.inf]))
@pytest.mark.parametrize("seqlen_q", [1, 40])
@pytest.mark.parametrize("features", ["causal", "causal-window", "window", "causal-bias", "causal-keymask"])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_what_no_query_sees_may_hold_anything(loads: str, garbage: float, seqlen_q: int, features: str) -> None:
    """As behind the filled part of a static cache."""
    spec = Specialization.parse(f"fwd-fp16-d16-{features}")
    q, k, v = tensors((1, 2, 1, seqlen_q, 150), 16, 16, torch.float16, "bhsd")
    offset = 60
    first, last = (offset - 21 if spec.window else 0), offset + seqlen_q + (0 if spec.causal else 3)
    host: dict[str, object] = {"window": (21, None if spec.causal else 3)} if spec.window else {}
    if spec.bias:
        host["bias"] = torch.randn(1, 1, seqlen_q, 152).half()[..., :150]
    clean = attention(q, k, v, Rules(causal=spec.causal, q_offset=offset, **host))
    if spec.mask:
        host["mask"] = (torch.arange(160) % 3 > 0)[:150].view(1, 1, 1, 150)
        clean = attention(q, k, v, Rules(causal=True, q_offset=offset, **host))
        k[:, :, ::3], v[:, :, ::3] = garbage, garbage
    k[:, :, :first], v[:, :, :first] = garbage, garbage
    k[:, :, last:], v[:, :, last:] = garbage, garbage
    compare(run(spec, config_for(spec, loads=loads), q, k, v, q_offset=offset, **host), clean)


PADDINGS = {
    "none": [(0, 200)],
    "right": [(0, 130)],
    "left": [(70, 200)],
    "both": [(37, 165)],
    "blocks": [(32, 160)],
    "one key": [(99, 100)],
    "end": [(199, 200)],
    "holes": [(20, 60), (64, 150), (190, 191)],
    "all": [],
}
"""What masks of keys show of 200."""


def padding_mask(names: list[str]) -> torch.Tensor:
    """A row for each sequence, of which multiples of 16 bytes lie apart."""
    mask = torch.zeros(len(names), 1, 1, 208, dtype=torch.bool)
    for row, name in zip(mask, names, strict=True):
        for begin, end in PADDINGS[name]:
            row[..., begin:end] = True
    return mask[..., :200]


@LOADS
@pytest.mark.parametrize(
    ("features", "garbage"),
    every(
        3,
        [
            ("keymask", False),
            ("keymask", True),
            ("causal-keymask", True),
            ("causal-window-keymask", True),
            ("window-keymask-scattered", True),
            ("keymask-bias-sink", False),
            ("keymask-bias-sink", True),
        ],
    ),
)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_masks_of_padding(loads: str, features: str, garbage: bool) -> None:
    """Each sequence padded in its own way, and infinity or NaN in what is padding."""
    spec = Specialization.parse(f"fwd-fp16-d16-{features}")
    # a second head where heads differ, and a second block of queries where these see other keys
    nheads, seqlen_q = 2 if spec.bias or spec.sink else 1, 40 if spec.causal or spec.window else 20
    q, k, v = tensors((len(PADDINGS), nheads, 1, seqlen_q, 200), 16, 16, torch.float16, "bhsd")
    mask = padding_mask(list(PADDINGS))
    host: dict[str, object] = {"mask": mask}
    host |= {"window": (90, None if spec.causal else 31)} if spec.window else {}
    host |= {"bias": torch.randn(1, nheads, seqlen_q, 208).half()[..., :200]} if spec.bias else {}
    host |= {"sinks": torch.tensor([0.5, -1.0])} if spec.sink else {}
    if garbage:
        hidden = ~mask[:, :, 0, :, None]
        k, v = k.masked_fill(hidden, math.nan), v.masked_fill(hidden, math.inf)
    got = run(spec, config_for(spec, loads=loads), q, k, v, **host)
    compare(got, attention(q, k.nan_to_num(0.0), v, Rules(causal=spec.causal, **host)))
    assert spec.sink or torch.all(got[1][list(PADDINGS).index("all")] == -math.inf)


@LOADS
@pytest.mark.parametrize(
    ("features", "padding", "unmasked", "masked"),
    [
        ("keymask", "none", 6, 1),
        ("keymask", "right", 4, 1),
        ("keymask", "left", 3, 2),
        ("keymask", "both", 3, 2),
        ("keymask", "blocks", 4, 0),
        ("keymask", "one key", 0, 1),
        ("keymask", "holes", 0, 6),
        ("keymask", "all", 0, 0),
        ("causal-keymask", "right", 4, 1),
        ("causal-keymask", "left", 2, 3),
        ("causal-keymask", "none", 5, 2),
    ],
)
def test_padding_costs_no_block(loads: str, features: str, padding: str, unmasked: int, masked: int) -> None:
    """Steps of one query block: those outside the visible keys are none, those inside need no mask without holes."""
    spec = Specialization.parse(f"fwd-fp16-d16-{features}")
    q, k, v = tensors((1, 1, 1, 20, 200), 16, 16, torch.float16, "bhsd")
    source = render_standalone(spec, config_for(spec, loads=loads))
    module = load_module(source)
    step, flags = module._softmax_step, []

    def counted(*arguments: object) -> object:
        flags.append(bool(arguments[-2]))
        return step(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_softmax_step", counted)
        getattr(module, f"{source.entry}_call")(q, k, v, mask=padding_mask([padding]))
    assert (flags.count(False), flags.count(True)) == (unmasked, masked)


@LOADS
@pytest.mark.parametrize("strength", [-1e4, -30.0, 0.0, 30.0, 1e4])
def test_a_sink_may_dominate(loads: str, strength: float) -> None:
    """Were it the running maximum from the start, the fp16 p of all other keys would be 0 long before their sum is."""
    sinks = torch.tensor([strength, 0.5])
    check("fwd-fp16-d16-causal-sink", (1, 2, 1, 40, 70), loads, Rules(causal=True, sinks=sinks), sinks=sinks)


def test_a_dominating_sink_leaves_small_outputs_their_digits() -> None:
    spec = Specialization.parse("fwd-fp16-d16-sink")
    q, k, v = tensors((1, 1, 1, 33, 64), 16, 16, torch.float16, "bhsd")
    v, sinks = v.abs() * 1000, torch.tensor([15.0])
    out, _ = run(spec, config_for(spec), q, k, v, sinks=sinks)
    expected, _ = attention(q, k, v, Rules(sinks=sinks))
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=0)


@LOADS
def test_rows_that_see_no_key(loads: str) -> None:
    spec = Specialization.parse("fwd-fp16-d16-sink-bias-mask")
    q, k, v = tensors((2, 2, 1, 40, 70), 16, 16, torch.float16, "bhsd")
    mask = (torch.rand(2, 1, 40, 80, generator=torch.Generator().manual_seed(0)) > 0.5)[..., :70]
    mask[:, :, 7] = False
    bias = torch.zeros(1, 2, 40, 72, dtype=torch.float16)[..., :70]
    bias[:, :, 11] = -math.inf
    sinks = torch.tensor([0.25, -2.0])
    got = run(spec, config_for(spec, loads=loads), q, k, v, sinks=sinks, bias=bias, mask=mask)
    compare(got, attention(q, k, v, Rules(sinks=sinks, bias=bias, mask=mask)))
    assert torch.all(got[0][:, :, [7, 11]] == 0)
    torch.testing.assert_close(got[1][:, :, 7], sinks.expand(2, 2))


def test_large_scores_lose_no_mask() -> None:
    """Masking is -inf: a big negative number would win over scores like these."""
    spec = Specialization.parse("fwd-fp32-d16-window-bias-mask")
    q, k, v = tensors((1, 1, 1, 33, 60), 16, 16, torch.float32, "bhsd")
    q, k = q.abs() * 3e4, -k.abs() * 3e4
    mask = torch.arange(64)[:60].view(1, 1, 1, 60).expand(1, 1, 33, 60).contiguous() % 2 > 0
    mask = torch.nn.functional.pad(mask, (0, 4))[..., :60]
    bias = torch.full((1, 1, 33, 60), -1e9)  # 60 columns of 4 bytes are a multiple of 16
    got = run(spec, config_for(spec, loads="pointer"), q, k, v, window=(9, 9), bias=bias, mask=mask, softmax_scale=1.0)
    expected = attention(q, k, v, Rules(window=(9, 9), bias=bias, mask=mask, softmax_scale=1.0))
    assert expected[1].max() < -1e8
    torch.testing.assert_close(got[0].double(), expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[1].double(), expected[1], atol=0, rtol=1e-6)


@pytest.mark.parametrize("offset", [[-30, 0, 90], [1000, -1000, 70]])
def test_offsets_of_sequences_move_windows_and_slopes(offset: list[int]) -> None:
    slopes = torch.rand(3, 2, generator=torch.Generator().manual_seed(1)) / 100
    q_offset = torch.tensor(offset, dtype=torch.int32)
    rules = Rules(q_offset=q_offset, window=(30, 8), alibi_slopes=slopes)
    host = {"q_offset": q_offset, "window": (30, 8), "alibi_slopes": slopes}
    check("fwd-fp32-d16-alibi-window-offset", (3, 2, 1, 40, 70), "pointer", rules, **host)


def test_no_key_leaves_the_sink() -> None:
    spec = Specialization.parse("fwd-fp16-d16-sink")
    q, k, v = tensors((2, 2, 1, 5, 0), 16, 16, torch.float16, "bhsd")
    out, lse = run(spec, config_for(spec), q, k, v, sinks=torch.tensor([1.0, 2.0]))
    assert torch.all(out == 0)
    assert torch.equal(lse, torch.tensor([1.0, 2.0])[None, :, None].expand(2, 2, 5))
