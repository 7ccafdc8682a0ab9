"""The sections of the page, in the order a reader asks: what won, how it was found, what mattered, what failed."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence

from flashgen.core.feature_words import describe
from flashgen.core.record import DECIDED
from flashgen.report import charts, figures
from flashgen.report.about import device_section, runs_section, stale_section
from flashgen.report.contents import Contents, Entry, Search
from flashgen.report.drawing import Picture
from flashgen.report.importance import LEAST_TRIALS, importances
from flashgen.report.parts import Section, Table
from flashgen.tuning.report import short_config

MAX_GROUPS = 40
"""Rows of the picture of ratios; how many more groups there are is said above it."""

MAX_SMALL = 24
"""Searches that have a picture of their own: those with the most trials."""

NO_TRIALS = "No trial is stored here: records were given away without the searches that found them."


def sections(contents: Contents) -> list[Section]:
    """All sections; one that has nothing to show says why."""
    return [
        winners(contents),
        races(contents),
        convergence(contents.searches),
        knobs(contents.searches),
        registers(contents.searches),
        failures(contents.searches),
        *(device_section(device, contents) for device in contents.devices),
        stale_section(contents),
        runs_section(contents),
    ]


def winners(contents: Contents) -> Section:
    """What serves each workload, and how it compares with torch."""
    groups = figures.ratios_to_torch(contents.entries)
    ratios = [ratio for group in groups for ratio in group.ratios]
    workloads = {entry.record.workload for entry in contents.entries}
    lines = [
        f"{len(workloads)} workloads have a record. A ratio is the time of torch's fastest backend of "
        "scaled_dot_product_attention, measured in the same race, over the time of the record: above 1 the generated "
        "kernel is faster."
    ]
    if ratios:
        ahead = sum(ratio > 1 for ratio in ratios)
        lines.append(
            f"Of {len(ratios)} records measured beside torch {ahead} are faster; geometric mean "
            f"{statistics.geometric_mean(ratios):.2f}x, least {min(ratios):.2f}x, most {max(ratios):.2f}x."
        )
    else:
        lines.append("None of them was measured beside a backend of torch.")
    if len(groups) > MAX_GROUPS:
        lines.append(f"The picture has the first {MAX_GROUPS} groups; {len(groups) - MAX_GROUPS} more are not drawn.")
    return Section(
        id="winners",
        title="Winners",
        lines=tuple(lines),
        pictures=(charts.torch_ratios(groups[:MAX_GROUPS]),) if groups else (),
        tables=tuple(_winner_tables(contents)),
    )


def races(contents: Contents) -> Section:
    """How surely a winner is the best of those that it met."""
    found = figures.races(contents.entries)
    if not found:
        why = "No record has the rivals of its last race stored with it."
        return Section(id="races", title="How sure winners are", lines=(why,))
    leads = [race.lead for race in found if race.lead is not None]
    return Section(
        id="races",
        title="How sure winners are",
        lines=tuple(_sureness(found, leads)),
        pictures=(charts.leads(leads),) if leads else (),
        tables=(
            Table(
                title="Last races, the closest first",
                columns=("workload", "device", "rivals", "next best over winner", "rounds", "confidence"),
                rows=tuple(
                    (
                        *(race.record.workload.key, race.record.device.name, race.rivals, race.lead, race.rounds),
                        race.verdict,
                    )
                    for race in found
                ),
            ),
        ),
    )


def _sureness(found: Sequence[figures.Race], leads: Sequence[float]) -> Iterator[str]:
    close = sum(lead < figures.WITHIN for lead in leads)
    yield (
        f"Of {len(leads)} records whose last race is stored, {close} had a rival within 2%: measured again, another "
        "one of them may win, and little is lost by that."
    )
    if len(leads) < len(found):
        yield (
            f"{len(found) - len(leads)} more were raced on several profiles of lengths, and of their rivals the times "
            "on one of them are stored: who came how near is not known."
        )
    known = [race.confidence for race in found if race.confidence is not None]
    sure = [confidence for confidence in known if confidence >= DECIDED]
    if sure:
        yield (
            f"{len(sure)} of {len(known)} races ended with a confidence that no rival is faster by 2%: median "
            f"{statistics.median(sure):.0%}, least {min(sure):.0%}."
        )
    if len(sure) < len(known):
        yield (
            f"{len(known) - len(sure)} ended undecided: their windows cannot tell whether a rival is faster by 2%, "
            "which is not to say that one is."
        )


def convergence(searches: tuple[Search, ...]) -> Section:
    """How fast searches found what they ended with, and who had proposed it."""
    curves = sorted(figures.curves(searches), key=lambda curve: (-curve.trials, curve.search.workload.key))
    if not curves:
        return Section(id="convergence", title="Convergence of searches", lines=(NO_TRIALS,))
    arrived = sorted(curve.arrived for curve in curves)
    lines = [
        "The best time so far over the best of the same search: a line that is flat early found its winner early. "
        "What a search did not try it cannot show.",
        f"Half of {len(curves)} searches were within 2% of their best after {statistics.median_low(arrived)} trials, "
        f"the last one after {arrived[-1]}.",
    ]
    if len(curves) > MAX_SMALL:
        lines.append(f"The {MAX_SMALL} with the most trials have a picture of their own; the table has all of them.")
    rows = [
        (
            *(curve.search.workload.key, curve.search.device.name, curve.search.run, curve.trials),
            *(len(curve.search.failed), curve.best_ms, curve.arrived),
        )
        for curve in curves
    ]
    return Section(
        id="convergence",
        title="Convergence of searches",
        lines=tuple(lines),
        pictures=tuple(_convergence_pictures(curves)),
        small=tuple((curve.search.workload.key, charts.one_search(curve)) for curve in curves[:MAX_SMALL]),
        tables=(
            Table(
                title="Searches",
                columns=("workload", "device", "run", "trials", "failed", "best ms", "within 2% after"),
                rows=tuple(rows),
            ),
            Table(
                title="Who proposed candidates",
                columns=("source", "trials", "best of a search"),
                rows=tuple(figures.sources(searches)),
                is_open=True,
            ),
        ),
    )


def knobs(searches: tuple[Search, ...]) -> Section:
    """What decides the time of a kernel."""
    title = "Importance of knobs"
    found = importances(searches)
    if not found:
        why = f"No search measured {LEAST_TRIALS} candidates of one family, below which nothing can be said."
        return Section(id="knobs", title=title, lines=(why if searches else NO_TRIALS,))
    families = [tuple(each) for _, each in itertools.groupby(found, key=lambda share: share.family)]
    return Section(
        id="knobs",
        title=title,
        lines=(
            "The share of a knob in what tells the fastest tenth of the trials from all of them (Optuna's PED-ANOVA, "
            f"the mean over searches with {LEAST_TRIALS} measured candidates of a family). A search measures more "
            "candidates near its best, so shares of rarely tried values are rough.",
        ),
        pictures=tuple(charts.knob_shares(shares) for shares in families),
    )


def registers(searches: tuple[Search, ...]) -> Section:
    """Registers against time."""
    title = "Registers against time"
    points = list(_register_points(searches))
    if not points:
        why = "No trial has the compiler's figures stored with it." if searches else NO_TRIALS
        return Section(id="registers", title=title, lines=(why,))
    return Section(
        id="registers",
        title=title,
        lines=(
            "A mark is a measured candidate; of several kernels the one with the most registers counts. What is slower "
            f"than {charts.WORST:g} times the best lies on the upper edge.",
        ),
        pictures=(charts.registers(points),),
    )


def failures(searches: tuple[Search, ...]) -> Section:
    """Why candidates have no time."""
    reasons = figures.failures(searches)
    tried = sum(len(search.trials) for search in searches)
    if not reasons:
        why = f"None of {tried} candidates failed." if searches else NO_TRIALS
        return Section(id="failures", title="Failures", lines=(why,))
    count = sum(reason.count for reason in reasons)
    return Section(
        id="failures",
        title="Failures",
        lines=(
            f"{count} of {tried} candidates failed. In a search that is data, no error: build is a compile, verify a "
            "wrong result, resources too many spilled registers or too much shared memory.",
        ),
        pictures=(charts.failed_stages(reasons),),
        tables=(
            Table(
                title="Reasons, numbers in them as #",
                columns=("stage", "family", "reason", "candidates"),
                rows=tuple((each.stage, each.family, each.reason, each.count) for each in reasons),
            ),
        ),
    )


def _convergence_pictures(curves: Sequence[figures.Curve]) -> Iterable[Picture]:
    trials = [curve.values for curve in curves]
    yield charts.convergence(trials, unit="trials", end=max(curve.trials for curve in curves))
    seconds = [curve.seconds for curve in curves if curve.seconds]
    if seconds:
        lasts = [trial.elapsed_s or 0.0 for curve in curves for trial in curve.search.trials[-1:]]
        yield charts.convergence(seconds, unit="seconds", end=max(*lasts, *(line[-1][0] for line in seconds), 1.0))


def _winner_tables(contents: Contents) -> Iterable[Table]:
    columns = (
        *("workload", "features", "ms", "TFLOP/s", "of peak", "to torch", "fastest of torch", "spread"),
        *("config", "provenance", "made"),
    )
    kinds: dict[str, list[Entry]] = {}
    for entry in contents.entries:
        kinds.setdefault(f"{entry.record.device.name}, {entry.record.workload.direction}", []).append(entry)
    slower = [entry for entry in contents.entries if (figures.ratio_of(entry.record) or 1) < 1]
    if slower:
        yield Table(title="Slower than torch", columns=columns, rows=tuple(_winner(entry) for entry in slower))
    for title, entries in kinds.items():
        yield Table(title=title, columns=columns, rows=tuple(_winner(entry) for entry in entries))


def _winner(entry: Entry) -> tuple[str | float | None, ...]:
    record, peak = entry.record, entry.record.device.peak_tflops
    best = record.best_baseline
    share = None if not peak or record.tflops is None or record.workload.is_decode else record.tflops / peak
    return (
        record.workload.key,
        describe(record.workload),
        record.time_ms,
        record.tflops,
        None if share is None else f"{share:.0%}",
        figures.ratio_of(record),
        None if best is None else best.impl,
        None if record.measurement is None else f"{record.measurement.spread:.1%}",
        f"{record.config.family}: {short_config(record)}",
        record.provenance,
        record.created[:10],
    )


def _register_points(searches: Iterable[Search]) -> Iterable[tuple[str, int, bool, float, str]]:
    for search in searches:
        for trial, value in search.measured:
            compiled = trial.compiled
            if compiled is not None:
                text = f"{search.workload.key}, {trial.config}: {compiled.registers} registers, {value:.2f}x"
                yield search.workload.direction, compiled.registers, compiled.spills > 0, value, text
