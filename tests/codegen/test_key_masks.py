"""Which keys of a mask the kernels of the Hopper forward family walk."""

from __future__ import annotations

import random

import pytest
import torch

from flashgen.codegen.hopper_forward import rules
from flashgen.codegen.hopper_forward.family import HOPPER_FORWARD
from flashgen.codegen.render import KernelSource, render
from flashgen.core.device import find_device
from flashgen.core.workload import Specialization
from flashgen.measure.key_masks import FORMS, make_key_mask
from tests.codegen.gluon_stub import Pointer, Tile, functions

H200 = find_device("h200")
BEHIND = 40
"""Bytes of other masks behind the last one, all visible."""


def rendered(key: str) -> KernelSource:
    spec = Specialization.parse(key)
    return render(spec, HOPPER_FORWARD.default(spec, H200))


def bounds(mask: torch.Tensor) -> tuple[int, int, int]:
    """The first visible key, the end of the last one, and whether there are hidden ones between."""
    visible = mask.nonzero().flatten().tolist()
    if not visible:
        return mask.numel(), 0, 0
    return visible[0], visible[-1] + 1, int(visible[-1] + 1 - visible[0] > len(visible))


@pytest.mark.parametrize("seqlen_k", [1, 15, 16, 17, 127, 512, 530, 2065])
@pytest.mark.parametrize("scattered", ["", "-scattered"])
def test_a_program_finds_where_the_visible_keys_are(seqlen_k: int, scattered: str) -> None:
    (scan,) = functions(rendered(f"fwd-bf16-d64-keymask{scattered}"), "_visible_key_range")
    generator, step = torch.Generator().manual_seed(seqlen_k), 3 if scattered else 1
    row = -(-seqlen_k // 16) * 16 * step
    for form in FORMS:
        masks = make_key_mask(form, (3, 2), seqlen_k, generator)[:, :, 0]
        memory = torch.full((6 * row + BEHIND,), 7, dtype=torch.uint8)
        rows = memory[: 6 * row].view(3, 2, row)
        # what is not 0 is visible, whatever it is
        rows[:, :, : seqlen_k * step : step] = masks.byte() * torch.tensor([1, 2, 255]).byte()[:, None, None]
        given = (Pointer(memory=memory), 2 * row, row, *([step] if scattered else []))
        for b in range(3):
            for h in range(2):
                found = scan(b * 2 * row + h * row, given, (2, 1, 64, seqlen_k))
                assert tuple(map(int, found)) == bounds(masks[b, h]), (form, b, h)


@pytest.mark.parametrize("places", ["", "-causal", "-window", "-causal-window"])
def test_a_tile_walks_from_its_last_visible_key_to_its_first(places: str) -> None:
    """No block outside is loaded, none inside is left out, and a tile that sees no key has one block all the same."""
    source = rendered(f"fwd-bf16-d64{places}-keymask")
    (key_blocks,) = functions(source, "_key_blocks")
    block_m, block_n = (
        int(source.text.split(f"{name} = gl.constexpr(")[1].split(")")[0]) for name in ("BLOCK_M", "BLOCK_N")
    )
    spec, random_ = Specialization.parse(f"fwd-bf16-d64{places}-keymask"), random.Random(5)
    for _ in range(300):
        seqlen_q, seqlen_k = random_.randint(1, 600), random_.randint(1, 900)
        offset, left = random_.choice([0, seqlen_k - seqlen_q, -40, 200]), random_.randint(0, 300)
        right = 0 if spec.causal else random_.randint(0, 300)
        start, end = sorted(random_.choices(range(seqlen_k + 1), k=2))
        start, end = (start, end) if start < end else (seqlen_k, 0)
        tile = random_.randrange(-(-seqlen_q // block_m)) * block_m
        edges = [offset, *([left] if spec.window else []), *([right] if spec.window and not spec.causal else [])]
        positional = [tile, *edges, start, end, seqlen_q]
        n, last = key_blocks(*(positional if places else [start, end]))
        seen = [
            j // block_n
            for i in range(tile, min(tile + block_m, seqlen_q))
            for j in (
                max(start, i + offset - left if spec.window else 0),
                min(end, i + offset + right + 1 if places else end) - 1,
            )
            if max(start, i + offset - left if spec.window else 0) < min(end, i + offset + right + 1 if places else end)
        ]
        expected = (max(seen) + 1 - min(seen), max(seen)) if seen else None
        assert n >= 1
        assert last >= 0
        assert last - n + 1 >= 0
        assert expected is None or (n, last) == expected


def test_both_roles_walk_what_the_producer_found() -> None:
    """Two searches, or one of a role alone, could disagree on the number of steps, and then both wait for ever."""
    text = rendered("fwd-bf16-d128-causal-keymask").text
    assert text.count("= _key_blocks(tile_row, offset, first_visible, visible_end, seqlen_q)") == 2
    assert text.count("= _visible_key_range(") == 1
    assert "gl.program_id(0)" not in text.split("def _consumer(")[1].split("\n\n\n")[0]


def test_a_step_loads_a_mask_only_where_it_hides_keys() -> None:
    step = rendered("fwd-bf16-d128-keymask").text.split("def _step(")[1].split("\n\n\n")[0]
    assert "_load_mask" not in step
    assert step.count("    if hides:\n") == 2


@pytest.mark.parametrize("places", ["", "-causal"])
def test_references_may_be_those_of_the_first_keys(places: str) -> None:
    """The last visible key is in the first step; a mask of single scores, or a bias, may hide it from a row."""
    spec = Specialization.parse(f"fwd-bf16-d128{places}-keymask")
    assert rules.why_not_row_sums(spec) is None
    for other in ("mask", "keymask-keybias", "bias"):
        assert rules.why_not_row_sums(Specialization.parse(f"fwd-bf16-d128{places}-{other}")) is not None
    text = rendered(spec.key).text
    assert ("holes != 0), n" in text) == bool(places), (
        "behind the diagonal a row sees its own key, unless that is hidden"
    )


@pytest.mark.parametrize("places", ["-causal", "-window", "-causal-window"])
@pytest.mark.parametrize("scattered", ["", "-scattered"])
def test_a_warpgroup_writes_back_no_row_of_v_that_is_hidden(places: str, scattered: str) -> None:
    """Others may have cleared a row after it was read, and multiply what is written: all that is hidden is cleared."""
    source = rendered(f"fwd-bf16-d64{places}-keymask{scattered}")
    (clear,) = functions(source, "_clear_masked")
    assert "_clear_hidden" not in source.text, "two functions that clear a part each write the other's back"
    random_, step, seqlen_k = random.Random(3), 3 if scattered else 1, 300
    block_n = int(source.text.split("BLOCK_N = gl.constexpr(")[1].split(")")[0])
    for form in FORMS:
        mask = make_key_mask(form, (1, 1), seqlen_k, torch.Generator().manual_seed(7))[0, 0, 0]
        memory = torch.full((seqlen_k * step,), 7, dtype=torch.uint8)
        memory[::step] = mask.byte()
        start, end = random_.randint(0, 200) if "window" in places else 0, random_.randint(200, 320)
        numbers = {"scale": 1.0, "mask_base": Pointer(memory=memory), "stride_mask_k": step, "seqlen_k": seqlen_k}
        numbers |= {"key_start": start, "key_end": end}
        for first_key in range(0, seqlen_k, block_n):
            keys = torch.arange(first_key, first_key + block_n)
            seen = (keys >= start) & (keys < end) & torch.nn.functional.pad(mask, (0, block_n))[keys]
            tile = Tile(rows=torch.where(seen, keys + 1.0, torch.nan)[:, None].expand(-1, 8))
            clear(tile, first_key, tuple(numbers[name] for name in rule_names(source)))
            assert torch.equal(tile.written, torch.where(seen, keys + 1.0, 0.0)[:, None].expand(-1, 8)), form


def rule_names(source: KernelSource) -> list[str]:
    return source.text.split("def _clear_masked(")[1].split(" = rule")[0].split("\n    ")[-1].split(", ")
