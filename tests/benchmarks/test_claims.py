"""Every sentence about speed or memory on the pages is true of the committed rows.

A claim is a sentence with its file and a check of the rows; numbers in it are read out of it. A sentence that sounds
like one is in `CLAIMS`, or in `NO_CLAIMS` because the results do not decide about it.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from benchmarks.decode_cases import SUITE as DECODE_SUITE
from benchmarks.memory import TRAINING_SUITE as MEMORY_SUITE
from benchmarks.report import load
from benchmarks.results import RESULTS, Row
from benchmarks.suites import BACKWARD_SUITE, BOTH_PASSES, DATA_SUITE, FP16_SUITE, MODELS
from benchmarks.training_tables import MODES
from benchmarks.training_tasks import BERT, PADDED
from benchmarks.varlen_cases import SUITE, TRAINING_SUITE
from flashgen.codegen.families import FAMILIES
from flashgen.core.workload import Workload
from tests.benchmarks.packed_claims import all_beside_dense, beside_dense, beside_peers, over_pages, what_tiles_leave

ROOT = Path(__file__).resolve().parents[2]
ROWS = load(RESULTS)["nvidia_h200"]
EQUAL = 0.05
"""Means that are no farther apart are level, and a time that is no longer is as long."""

Check = Callable[[re.Match[str], Sequence[Row]], list[str]]
"""What is wrong with a sentence, with the figures that say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A sentence (or the part of it that claims something) as a pattern, and what the rows have to say."""

    file: str
    sentence: str
    check: Check

    def faults(self, rows: Sequence[Row]) -> list[str]:
        """Nothing if the sentence is there once and true, else the sentence with each figure against it."""
        found = list(re.finditer(self.sentence, flat(self.file)))
        if len(found) != 1:
            return [f"{self.file} has {len(found)} times {self.sentence!r}"]
        return [f"{self.file}: {found[0][0]!r}, but {fault}" for fault in self.check(found[0], rows)]


def flat(file: str) -> str:
    """A page in one line."""
    return " ".join((ROOT / file).read_text(encoding="utf-8").split())


def ratios(
    rows: Sequence[Row], suites: Sequence[str], peer: str, wanted: Callable[[Workload], bool] = lambda w: True
) -> list[float]:
    """The time of a peer over flashgen's, where both have one."""
    times: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row.suite in suites and row.median_ms and wanted(Workload.parse(row.workload)):
            times[row.suite, row.workload][row.impl] = row.median_ms
    return [by_impl[peer] / by_impl["flashgen"] for by_impl in times.values() if {peer, "flashgen"} <= by_impl.keys()]


def mean(values: Sequence[float]) -> float:
    return statistics.geometric_mean(values)


def dim(head_dim: int) -> Callable[[Workload], bool]:
    return lambda workload: workload.head_dim == head_dim


def beside_the_best(match: re.Match[str], rows: Sequence[Row]) -> list[str]:
    found = {peer: mean(ratios(rows, ["forward"], peer)) for peer in ("fa3", "fa4", "sdpa-cudnn")}
    faults = [f"the mean against {peer} is {ratio:.3f}" for peer, ratio in found.items() if ratio <= 1]
    capped = ratios(rows, ["features", *MODELS], "fa3", lambda w: w.softcap)
    assert capped
    return faults + [f"it is {ratio:.3f} of fa3 under a softcap" for ratio in capped if ratio < 0.99]


def pages(match: re.Match[str], rows: Sequence[Row]) -> list[str]:
    sizes = (16, 32, 8192)
    times = {
        w.page_size: row.median_ms
        for row in rows
        if row.suite == DECODE_SUITE and row.impl == "flashgen" and row.median_ms
        if (w := Workload.parse(row.workload)).seqlen_q == 1 and (w.batch, w.nheads, w.seqlen_k) == sizes
    }
    longer = 100 * (times[16] / times[None] - 1)
    return [] if round(longer) == int(match["percent"]) else [f"it is {longer:.1f}%"]


def deterministic(match: re.Match[str], rows: Sequence[Row]) -> list[str]:
    least, most = int(match["least"]), int(match["most"])
    longer = {d: 100 * (mean(ratios(rows, [BACKWARD_SUITE], "flashgen-deterministic", dim(d))) - 1) for d in (64, 128)}
    faults = [f"it is {more:.1f}% at head_dim {d}" for d, more in longer.items() if not least <= more <= most]
    wide = mean(ratios(rows, [BACKWARD_SUITE], "flashgen-deterministic", dim(256)))
    return faults + ([f"it is {wide:.3f} of the time at 256"] if abs(wide - 1) > EQUAL else [])


def hopper_backward(match: re.Match[str], rows: Sequence[Row]) -> list[str]:
    found = {d: mean(ratios(rows, [BACKWARD_SUITE], "fa4", dim(d))) for d in (64, 128, 256)}
    lowest = min(ratios(rows, [BACKWARD_SUITE], "sdpa-cudnn"))
    faults = [f"it is {found[d]:.3f} of fa4 at {d}" for d in (64, 128) if abs(found[d] - 1) > EQUAL]
    faults += [f"it is {found[256]:.3f} of fa4 at 256"] if found[256] <= 1 + EQUAL else []
    return faults + ([f"it is {lowest:.3f} of cuDNN on a row"] if lowest <= 1 else [])


def linear_memory(match: re.Match[str], rows: Sequence[Row]) -> list[str]:
    held: dict[int, dict[int, int]] = defaultdict(dict)
    for row in rows:
        if (row.suite, row.impl) == (MEMORY_SUITE, "flashgen") and row.extra_bytes is not None:
            workload = Workload.parse(row.workload)
            held[workload.head_dim][workload.seqlen_k] = row.extra_bytes
    assert held
    return [
        f"head_dim {d} holds {sizes[s] / 2**20:.1f} MiB at {s} and {sizes[2 * s] / 2**20:.1f} at {2 * s}"
        for d, sizes in held.items()
        for s in sizes
        if 2 * s in sizes and sizes[2 * s] > 2.1 * sizes[s]
    ]


def tolerated_spills(match: re.Match[str], rows: Sequence[Row]) -> list[str]:
    limits = {family.tolerated_spills for family in FAMILIES}
    return (
        [] if (min(limits), max(limits)) == (int(match["least"]), int(match["most"])) else [f"it is {sorted(limits)}"]
    )


def standing(match: re.Match[str], rows: Sequence[Row]) -> list[str]:
    """Counted anew from the cells, with whatever implementations the files have."""
    found = {name: int(match[name] or 0) for name in ("ahead", "count", "level", "behind")}
    limit = 1 - int(match["percent"] or match["near"] or 0) / 100
    best = list(against_the_best(rows))
    counted = {"ahead": sum(r > 1 for r in best), "count": len(best), "behind": sum(r < limit for r in best)}
    counted["level"] = len(best) - counted["ahead"] - counted["behind"]
    faults = [f"{name} is {counted[name]}, not {found[name]}" for name in found if counted[name] != found[name]]
    named = [float(figure) for figure in re.findall(r"\b\d\.\d\d\b", match["places"] or "")]
    right = [round(r, 2) for r in best if r < limit]
    if right and (min(named), max(named)) != (min(right), max(right)):
        faults.append(f"the figures are from {min(right)} to {max(right)}")
    return faults


def against_the_best(rows: Sequence[Row]) -> Iterator[float]:
    """The speed of flashgen over that of the fastest other implementation of each workload in README's table."""
    training = {*MODES, *BERT.suites.values(), *PADDED.suites.values()}
    suites = {"forward", FP16_SUITE, BACKWARD_SUITE, BOTH_PASSES, "features", *MODELS, *training}
    speeds: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for row in rows:
        speed = row.tokens_per_s if row.suite in training else row.tflops
        # what torch chooses without a mask is a backend that has a row of its own
        again = row.impl == "sdpa" and not Workload.parse(row.workload).mask
        if row.suite in suites and speed and not again and row.impl != "flashgen-deterministic":
            speeds[row.suite, row.workload][row.impl] = speed
    for by_impl in speeds.values():
        others = [speed for impl, speed in by_impl.items() if impl != "flashgen"]
        if "flashgen" in by_impl and others:
            yield by_impl["flashgen"] / max(others)


def hard_data(match: re.Match[str], rows: Sequence[Row]) -> list[str]:
    speeds: dict[tuple[str, str | None], dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row.suite == DATA_SUITE and row.tflops:
            speeds[row.workload, row.data][row.impl] = row.tflops
    found = [one["flashgen"] / max(v for name, v in one.items() if name != "flashgen") for one in speeds.values()]
    counted = f"{min(found):.2f}", len(found), sum(ratio >= 0.97 for ratio in found)
    said = match["lowest"], int(match["count"]), int(match["near"])
    return [] if counted == said else [f"it is {counted}"]


CLAIMS = [
    Claim(
        file="CHANGELOG.md",
        sentence="On an H200 it is ahead of FlashAttention-3 and -4 and of cuDNN in the mean over the papers' grid, "
        "and nowhere more than 1% behind FlashAttention-3 under a softcap",
        check=beside_the_best,
    ),
    Claim(
        file="README.md",
        sentence=r"flashgen is the fastest on (?P<ahead>\d+) of (?P<count>\d+) workloads"
        r"(?: and within (?P<near>\d+)% of the fastest on (?P<level>\d+) more)?\."
        r"(?: A peer is ahead by more than (?P<percent>\d+)% on (?P<behind>\d+): (?P<places>.*?\))\.)?",
        check=standing,
    ),
    Claim(
        file="README.md",
        sentence="memory that grows linearly with the sequence length",
        check=linear_memory,
    ),
    Claim(
        file="docs/attention.md",
        sentence=r"take (?P<least>\d+) to (?P<most>\d+)% longer at head_dim 64 and 128, in the mean over the .{10,50}, "
        "than those that add with atomics, and as long at 256",
        check=deterministic,
    ),
    Claim(
        file="docs/decisions/hopper-backward.md",
        sentence="it is level with FlashAttention-4 at head_dim 64 and 128 in the mean, ahead of it at 256, and ahead "
        "of cuDNN on every row",
        check=hopper_backward,
    ),
    Claim(
        file="docs/tuning.md",
        sentence=r"spills more bytes a thread than its family tolerates \((?P<least>\d+) to (?P<most>\d+)\)",
        check=tolerated_spills,
    ),
    Claim(
        file="docs/ragged.md",
        sentence=r"flashgen was ahead wherever a peer has a row\. Forward these are FlashAttention-3 and -4 on "
        r"(?P<fa>\d+) batches, FlexAttention and padded SDPA on (?P<flex>\d+), and torch's `varlen_attn` on "
        r"(?P<torch>\d+), which .{20,60}; forward and backward FlashAttention-4, FlexAttention and padded SDPA on "
        r"(?P<fa4>\d+), and `varlen_attn` on (?P<trained>\d+)\.",
        check=beside_peers,
    ),
    Claim(
        file="CHANGELOG.md",
        sentence=r"On hard data forward passes are at (?P<lowest>0\.\d\d) of the fastest peer or above in all "
        r"(?P<count>\d+) races of an H200 \(0\.78 before\), at 0\.97 in (?P<near>\d+)\.",
        check=hard_data,
    ),
    Claim(
        file="CHANGELOG.md",
        sentence=r"Steps in pages of 16 take (?P<percent>\d+)% longer than contiguous ones at 16 x 8192 keys",
        check=pages,
    ),
    Claim(
        file="docs/ragged.md",
        sentence=r"(?P<near>\d+) of (?P<count>\d+) batches reach 0\.97 of its rate",
        check=all_beside_dense,
    ),
    Claim(
        file="docs/ragged.md",
        sentence=r"a packed kernel as fast as a dense one would be at (?P<lowest>\d\.\d\d) to "
        r"(?P<highest>\d\.\d\d) of its rate",
        check=what_tiles_leave,
    ),
    Claim(
        file="docs/ragged.md",
        sentence=r"on four batches, of which flashgen was (?P<least>\d\.\d\d) times as fast on one of .{20,60}, "
        r"and (?P<lowest>\d\.\d\d) to (?P<highest>\d\.\d\d) times on the others",
        check=over_pages,
    ),
    *(
        Claim(
            file="docs/ragged.md",
            sentence=rf"\| {passes}, heads of {head_dim} \| (?P<count>\d+) \| (?P<near>\d+) \| (?P<lowest>\d\.\d\d) to "
            r"(?P<highest>\d\.\d\d) \|",
            check=beside_dense(suite, head_dim),
        )
        for suite, passes in ((SUITE, "forward"), (TRAINING_SUITE, "forward and backward"))
        for head_dim in (128, 64)
    ),
]

NO_CLAIMS = (
    # what a figure of a table is
    "How many times as fast as its peers flashgen is: geometric means over",
    # how it is measured
    "because a card at its power limit is as fast as the last tenths of a second let it be",
    "2.5 times the operations of the forward pass",
    # races of shapes that no suite has
    "the nearest record's tile took 1.09 times as long as the best one",
    "what serves takes 1.00 to 1.02 times the best tile's time in place of 1.01 to 1.18",
    "32 raced backward shapes took 1.12 times as long before on an H200",
    "causal heads of 64 columns took up to 1.10 times as long on an H200",
    "were searched again thirteen have another winner, in races up to 4% faster",
    "75 such shapes take 1.21 times as long without on an H200 in the mean",
    "is 0 to 5% slower in 91 of 91 records of an H200",
    # rules of flashgen's own
    "unless that is more than 10% slower on normal data",
    "one that stays 15% behind gets every tenth candidate",
    "served by a deterministic record that is faster than its own",
    "if that is more than 3% faster than its own",
    "more than 10% slower than it says",
    "no rival is faster by 2%",
    # of synthetic searches
    "twice as many would have saved 0.03 to 1.1% more",
    "times that nothing reaches",
    "a cache with heads before slots is passed as",
    "hold for longer than a minute are left out",
    "K and V side by side in a slot differ in strides alone",
    "Records say which kernel is the fastest",
)
"""Parts of sentences with the words of a claim on which the results do not decide."""

WORDS = re.compile(
    r"\bahead of\b|\b(is|are|or) ahead\b|\b(is|are) (the )?(faster|fastest)\b"
    r"|\b(faster|slower|longer|quicker) than\b"
    r"|\blevel with\b|\bas fast as\b|\bbeats\b|\boutperform|\bhalves?\b"
    r"|\d ?% (faster|slower|longer|ahead|behind|less|more)\b|\b\d+(\.\d+)? times (as|the|less|more|faster|slower)\b"
)
PAGES = ("README.md", "CHANGELOG.md", "benchmarks/README.md", *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")))
GENERATED = "docs/benchmarks.md"


def sentences(file: str) -> Iterator[str]:
    """What people wrote on a page, without what is generated between markers and without code."""
    text = re.sub(r"<!-- (\w+):start -->.*?<!-- \1:end -->", "", (ROOT / file).read_text(encoding="utf-8"), flags=re.S)
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    for block in re.split(r"\n\s*\n|\n(?=[-|*]|\d+\. )", text):
        yield from re.split(r"(?<=[.!?])\s", " ".join(block.split()))


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.file}: {claim.sentence[:40]}")
def test_a_claim_is_true_of_the_committed_rows(claim: Claim) -> None:
    assert not claim.faults(ROWS)


@pytest.mark.parametrize("file", [page for page in PAGES if page != GENERATED])
def test_a_sentence_that_sounds_like_a_claim_is_checked(file: str) -> None:
    checked = [claim.sentence for claim in CLAIMS if claim.file == file]
    loose = [
        sentence
        for sentence in sentences(file)
        if WORDS.search(sentence)
        and not any(re.search(pattern, sentence) for pattern in checked)
        and not any(part in sentence for part in NO_CLAIMS)
    ]
    assert not loose, "add a Claim, or to NO_CLAIMS what the results do not decide"


def test_no_excuse_is_left_over() -> None:
    every = [sentence for file in PAGES for sentence in sentences(file)]
    assert [part for part in NO_CLAIMS if not any(part in sentence for sentence in every)] == []


def changed(impl: str, factor: float) -> list[Row]:
    """The committed rows with one implementation faster by a factor; its memory grows with the square of the length."""

    def change(row: Row) -> Row:
        if row.impl != impl:
            return row
        n = Workload.parse(row.workload).seqlen_k if row.suite == MEMORY_SUITE else 1
        return replace(
            row,
            median_ms=row.median_ms and row.median_ms / factor,
            tflops=row.tflops and row.tflops * factor,
            extra_bytes=row.extra_bytes and row.extra_bytes * n,
        )

    return [change(row) for row in ROWS]


@pytest.mark.parametrize(
    ("index", "impl", "factor", "figure"),
    [
        (0, "fa4", 1.5, r"the mean against fa4 is 0\.\d+"),
        (0, "fa3", 1.5, r"it is 0\.\d+ of fa3 under a softcap"),
        (1, "fa3", 1.5, r"ahead is \d+, not \d+"),
        (2, "flashgen", 1.0, r"head_dim 64 holds \d+\.\d MiB at \d+ and \d+\.\d at"),
        (3, "flashgen-deterministic", 0.7, r"it is \d+\.\d% at head_dim 64"),
        (4, "sdpa-cudnn", 1.5, r"it is 0\.\d+ of cuDNN on a row"),
        (4, "fa4", 0.8, r"it is 1\.\d+ of fa4 at 64"),
        (6, "fa3", 1.5, r"it is ahead of fa3 on \d+ of 16 in varlen"),
        (6, "flex", 3.0, r"it is ahead of flex on \d+ of 10 in varlen_training"),
        (7, "sdpa-cudnn", 1.5, r"it is \('0\.\d+', 160, \d+\)"),
    ],
)
def test_rows_that_contradict_a_sentence_are_told_with_it(index: int, impl: str, factor: float, figure: str) -> None:
    faults = CLAIMS[index].faults(changed(impl, factor))
    assert any(re.search(rf"^{re.escape(CLAIMS[index].file)}: .*, but {figure}", fault) for fault in faults), faults


def test_rates_beside_a_dense_call_that_fall_are_told() -> None:
    claims = [claim for claim in CLAIMS if re.search("heads of|reach 0", claim.sentence)]
    assert len(claims) == 5
    for claim in claims:
        (fault,) = claim.faults(changed("flashgen-dense", 1.1))
        assert re.search(r", but it is \(\d+, \d+", fault)


def test_a_wrong_figure_of_pages_is_told() -> None:
    claim = next(claim for claim in CLAIMS if claim.check is pages)
    rows = [
        replace(row, median_ms=2 * row.median_ms) if row.median_ms and "page16" in row.workload else row for row in ROWS
    ]
    assert any(re.search(r", but it is 1\d\d\.\d%", fault) for fault in claim.faults(rows))
