from __future__ import annotations

import pytest
import torch

from flashgen.core.features.score_tensors import aligned_scores, broadcast_kind
from flashgen.core.features.values import Features
from flashgen.core.workload import Workload
from flashgen.measure.feature_inputs import FeatureForm, alibi_slopes, feature_bytes
from flashgen.measure.inputs import make_inputs, rotation_copies
from flashgen.measure.key_masks import FORMS


def features_of(key: str, *, padding: int = 0, copies: int = 1, **form: object) -> tuple[Features, ...]:
    inputs = make_inputs(
        Workload.parse(f"bf16-b3-h4-sq40-sk64-d16-{key}"),
        copies=copies,
        seed=1,
        device="cpu",
        padding=padding,
        form=FeatureForm(**form),  # type: ignore[arg-type]
    )
    return inputs.features


def test_a_plain_workload_has_none() -> None:
    assert features_of("causal") == (Features(),)


def test_slopes_are_those_of_the_paper() -> None:
    torch.testing.assert_close(alibi_slopes(8, "cpu"), torch.tensor([2.0**-n for n in range(1, 9)]))
    assert features_of("alibi")[0].alibi_slopes.shape == (4,)
    slopes = features_of("alibi", alibi_batch=True)[0].alibi_slopes
    assert slopes.shape == (3, 4)
    assert len(slopes.unique()) == 12


def test_sinks_window_and_softcap() -> None:
    features = features_of("sink-wl7-wr3-softcap")[0]
    assert features.sinks.shape == (4,)
    assert features.sinks.dtype == torch.float32
    assert features.window == (7, 3)
    assert features.softcap == 50.0
    assert features_of("sink", sink_dtype="bf16")[0].sinks.dtype == torch.bfloat16


def test_scores_are_so_large_that_a_cap_bends_them() -> None:
    inputs = make_inputs(Workload.parse("b1-h2-s64-d64-softcap"), copies=1, seed=1, device="cpu")
    scores = inputs.q[0].float() @ inputs.k[0].float().mT / 8
    assert 8 < float(scores.std()) < 17


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("bias", (1, 4, 40, 64)),
        ("keybias", (3, 1, 1, 64)),
        ("mask", (3, 1, 40, 64)),
        ("keymask", (3, 1, 1, 64)),
    ],
)
@pytest.mark.parametrize("padding", [0, 16])
def test_shapes_kinds_and_alignment(key: str, shape: tuple[int, ...], padding: int) -> None:
    (one, other) = features_of(key, padding=padding, copies=2)
    tensor, second = (each.bias if each.mask is None else each.mask for each in (one, other))
    assert tensor.shape == shape
    assert tensor.dtype == (torch.bool if "mask" in key else torch.bfloat16)
    assert broadcast_kind(tensor) == ("keys" if key.startswith("key") else "full")
    assert aligned_scores((tensor, second))
    assert tensor.is_contiguous() == (not padding)
    assert not torch.equal(tensor, second)
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    assert whole.numel() > tensor.numel() if padding else whole.numel() == tensor.numel()
    inside = whole.isnan().logical_not() if "bias" in key else None
    assert inside is None or int(inside.sum()) == tensor.numel()
    for form in ("odd", "transposed") if padding else ():
        (features,) = features_of(key, padding=padding, scattered=form)
        scattered = features.bias if features.mask is None else features.mask
        assert scattered.shape == shape
        assert not aligned_scores((scattered,))


def test_axes_choose_what_is_broadcast() -> None:
    (features,) = features_of("bias-mask", bias_axes=(True, False), mask_axes=(False, True), bias_dtype="fp32")
    assert features.bias.shape == (3, 1, 40, 64)
    assert features.bias.dtype == torch.float32
    assert features.mask.shape == (1, 4, 40, 64)


def test_a_full_mask_hides_a_quarter_and_a_few_keys_from_all() -> None:
    mask = features_of("mask")[0].mask
    assert 0.6 < float(mask.float().mean()) < 0.8
    assert int((~mask).all(2).all(0).sum()) >= 2
    assert mask.any(-1).all()
    blind = features_of("mask", blind=True)[0].mask
    assert 0 < int((~blind).all(-1).sum()) < 3 * 40


def test_a_key_mask_is_padding_at_the_end() -> None:
    mask = features_of("keymask")[0].mask
    lengths = mask.sum(-1).flatten()
    assert ((lengths >= 32) & (lengths <= 64)).all()
    assert torch.equal(mask, torch.arange(64) < lengths.view(3, 1, 1, 1))
    assert int(features_of("keymask", blind=True)[0].mask[-1].sum()) == 0


def test_a_key_mask_takes_every_form() -> None:
    masks = {form: features_of("keymask", visible_keys=form)[0].mask[:, 0, 0] for form in FORMS}
    runs = {form: visible_runs(mask) for form, mask in masks.items()}
    assert all(len(found) == 1 and found[0][0] == 0 for found in runs["end"])
    assert all(len(found) == 1 and found[0][1] == 64 for found in runs["start"])
    assert all(len(found) == 1 for found in runs["ends"])
    assert any(found[0][0] > 0 and found[0][1] < 64 for found in runs["ends"])
    assert all(len(found) > 1 for found in runs["holes"])
    assert all(end - start == 1 for found in runs["one"] for start, end in found)
    assert [len(found) for found in runs["one"]] == [1, 1, 1]
    assert runs["none"] == [[], [], []]


def visible_runs(mask: torch.Tensor) -> list[list[tuple[int, int]]]:
    """Of each row, the first visible key and the end of every run of them."""
    edges = torch.nn.functional.pad(mask.int(), (1, 1)).diff()
    starts, ends = ([row.nonzero().flatten().tolist() for row in edges == sign] for sign in (1, -1))
    return [list(zip(*pair, strict=True)) for pair in zip(starts, ends, strict=True)]


def test_bias_and_mask_count_as_memory() -> None:
    workload = Workload.parse("bf16-b2-h4-s256-d64-bias-mask")
    plain = Workload.parse("bf16-b2-h4-s256-d64")
    assert feature_bytes(workload) == 4 * 256 * 256 * 2 + 2 * 256 * 256
    sizes = [make_inputs(each, copies=2, seed=0, device="cpu").nbytes for each in (workload, plain)]
    assert sizes[0] - sizes[1] == 2 * feature_bytes(workload)
    assert rotation_copies(workload, 2**22) < rotation_copies(plain, 2**22)
