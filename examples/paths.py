"""Images in which two dots lie on one dashed path, or on two: a question about pixels that are far apart.

Of the kind of Pathfinder (Linsley et al., 2018), whose images of 128 x 128 pixels, read as one sequence of 16384, are
Path-X in the Long Range Arena (Tay et al., 2021). Every image has as many paths of the same kind, so neither their
number nor their ink tells the answer; dots are brighter than paths, and paths may cross, both unlike there. `EASY`
images are for a first lesson: how much is drawn tells the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

NOTHING, PATH, DOT = 0, 1, 2
"""What a pixel shows."""

DASH, PERIOD = 5, 8
"""Pixels of a dash, and from one dash to the next."""

RADIUS = 2
"""Of a dot, in pixels."""


@dataclass(frozen=True)
class Images:
    """What the images are: `size` pixels high and wide, with two paths and distractors, `length` pixels long each.

    `bend` is the standard deviation, in radians, of the change of direction from one pixel to the next. In an `easy`
    image whose dots lie on one path the other path is not drawn.
    """

    size: int = 128
    length: int = 100
    thickness: int = 3
    distractors: int = 4
    bend: float = 0.12
    easy: bool = False


EASY = Images(distractors=0, easy=True)
"""One path with a dot at each end, or two paths with one dot each."""


def batches(images: Images, batch: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (pixels, answers): (batch, size * size) int64, row by row, and (batch,) int64, 1 for dots on one path."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        answers = torch.randint(2, (batch,), generator=generator)
        yield draw(images, answers, generator), answers


def draw(images: Images, answers: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """An image for every answer."""
    batch, size = len(answers), images.size
    x, y = _paths(images, batch, generator)
    pixels = torch.full((batch, size * size), NOTHING)
    dashed = torch.arange(images.length) % PERIOD < DASH
    shown = y * size + x
    if images.easy:  # the first path covers the second one
        shown[:, 1] = torch.where((answers == 1)[:, None], shown[:, 0], shown[:, 1])
    brush = _square(images.thickness // 2)
    drawn = shown[:, :, dashed, None] + brush[:, 0] * size + brush[:, 1]
    pixels.scatter_(1, drawn.flatten(1), PATH)
    end = torch.where(answers == 1, 0, 1)  # the second dot ends the path of the first one, or another one
    each = torch.arange(batch)
    dot_x = torch.stack([x[:, 0, 0], x[each, end, -1]], dim=1)
    dot_y = torch.stack([y[:, 0, 0], y[each, end, -1]], dim=1)
    around = _square(RADIUS)
    around = around[around.square().sum(1) <= RADIUS**2 + 1]
    places = (dot_y[..., None] + around[:, 0]) * size + dot_x[..., None] + around[:, 1]
    return pixels.scatter_(1, places.flatten(1), DOT)


def _square(reach: int) -> torch.Tensor:
    """Every (y, x) that is so far away at most, (pixels, 2)."""
    steps = torch.arange(-reach, reach + 1)
    return torch.cartesian_prod(steps, steps)


def _paths(images: Images, batch: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """The pixels of smooth random walks, x and y, each (batch, paths, length) int64; dots at their ends have room."""
    shape = (batch, 2 + images.distractors, images.length)
    turns = torch.randn(shape, generator=generator) * images.bend
    turns[..., 0] = torch.rand(shape[:2], generator=generator) * 2 * math.pi
    angles = turns.cumsum(-1)
    found = []
    for walk in (angles.cos().cumsum(-1), angles.sin().cumsum(-1)):
        low, high = walk.amin(-1, keepdim=True), walk.amax(-1, keepdim=True)
        room = images.size - 1 - 2 * RADIUS - (high - low)
        start = RADIUS + room * torch.rand((*shape[:2], 1), generator=generator)
        found.append((walk - low + start).round().long())
    return found[0], found[1]
