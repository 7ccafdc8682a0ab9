"""`flashgen report`: what its page says of a database, of a run and of a device; it is inert, whoever wrote them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from flashgen.core.errors import DatabaseError
from flashgen.core.history import UNKNOWN, Origin
from flashgen.core.record import Failure, Measurement, TuningRecord
from flashgen.core.search_log import SearchLog
from flashgen.core.workload import Workload
from flashgen.report import about, charts, figures, page, sections
from flashgen.report.contents import Contents, Entry, Search, read
from flashgen.report.drawing import Scale
from flashgen.report.importance import LEAST_TRIALS, importances
from tests.cli.conftest import Invoke
from tests.cli.conftest import invoke as invoke  # noqa: PLC0414 - a fixture
from tests.db.samples import CAUSAL, H100, H200, MEASURED, PREDICTED, SHORT
from tests.report import databases
from tests.report.databases import ATTACKS, RUN, TRIALS

MOMENT = "2026-11-23T18:00:00+00:00"
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "header", "main", "section", "nav", "a", "h1", "h2", "p"),
    *("svg", "defs", "pattern", "rect", "path", "circle", "polyline", "text", "figure", "figcaption", "div"),
    *("details", "summary", "table", "thead", "tbody", "tr", "th", "td"),
}


class Page(HTMLParser):
    """The elements of a page, what their attributes are, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text.append(" ".join(data.split()))

    @property
    def words(self) -> str:
        return " ".join(self.text)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return databases.write(tmp_path_factory.mktemp("report") / "mine.sqlite3")


def search_of(*values: float | None) -> Search:
    """A search whose trials take so long; None has failed."""
    trials = []
    for number, (value, config) in enumerate(zip(values, databases.configs(len(values)), strict=True), 1):
        outcome = Failure(stage="build", reason="r") if value is None else Measurement(times_ms=(value,))
        trials.append(databases.trial(number, config, outcome=outcome))
    return Search(log=SearchLog(search=None, trials=tuple(trials)))


def test_the_page_says_what_a_database_knows(database: Path) -> None:
    found = Page(page.html(read([database]), created=MOMENT))
    assert "3 workloads have a record" in found.words
    assert "Of 2 records measured beside torch 1 are faster" in found.words
    assert f"within 2% of their best after" in found.words  # noqa: F541
    assert f"4 of {TRIALS} candidates failed" in found.words
    assert "needs # bytes of shared memory" in found.words
    assert "Importance of the knobs of portable_forward" in found.words
    assert "Registers against time of 36 candidates" in found.words
    assert "Slower than torch (1)" in found.words
    assert "1 records whose last race is stored, 1 had a rival within 2%" in found.words
    assert "median 97%" in found.words
    assert "3 of 3 records were made with kernels that this flashgen generates in another way" in found.words
    for fact in (
        CAUSAL.key,
        "portable_forward: block_m=128",
        "node7",
        "40 trials",
        RUN,
        H200.identity,
        "1815 to 1815 MHz",
    ):
        assert fact in found.words
    assert page.html(read([database]), created=MOMENT) == page.html(read([database]), created=MOMENT)


def test_a_database_without_trials_says_so_in_place_of_pictures(database: Path) -> None:
    contents = replace(read([database]), searches=())
    found = Page(page.html(contents, created=MOMENT))
    assert found.words.count("No trial is stored here") == 4
    assert "Winners" in found.words


def test_a_run_and_a_device_are_shown_alone(database: Path) -> None:
    contents = read([database])
    assert [entry.record.workload for entry in contents.of(run=RUN).entries] == [CAUSAL]
    assert len(contents.of(run="").searches) == 0
    assert contents.of(device=H200) == contents
    for asked in ({"run": "none"}, {"device": H100}):
        with pytest.raises(DatabaseError, match="a report needs records or trials"):
            contents.of(**asked)  # type: ignore[arg-type]


def fact(entries: Iterable[Entry], name: str) -> str | None:
    """What the section of the H200 says under a name."""
    table = about.device_section(H200, Contents(databases=(), entries=tuple(entries))).tables[0]
    return next((str(value) for fact, value in table.rows if fact == name), None)


def entry_of(record: TuningRecord) -> Entry:
    return Entry(record=record, origin=UNKNOWN, database="mine")


def test_a_workload_with_several_records_is_one_workload() -> None:
    others = (PREDICTED, replace(MEASURED, device=H100))
    contents = Contents(databases=(), entries=tuple(map(entry_of, (MEASURED, *others))))
    first = sections.winners(contents).lines
    assert first[0].startswith("1 workloads have a record.")
    assert first[1].startswith("Of 2 records measured beside torch ")


def test_the_fastest_record_was_measured() -> None:
    predicted = entry_of(replace(PREDICTED, predicted_ms=0.01, baselines=MEASURED.baselines))
    assert fact([predicted], "fastest record") is None
    assert figures.ratio_of(predicted.record) is None  # no race was run that torch could have been in
    fastest = fact([entry_of(MEASURED)], "fastest record")
    assert fastest is not None
    assert fact([entry_of(MEASURED), predicted], "fastest record") == fastest


def test_a_run_begins_with_its_earliest_record_or_trial() -> None:
    late = replace(MEASURED, created="2026-11-22T12:00:00+00:00")
    entry = Entry(record=late, origin=Origin(run=RUN, host="node7", budget="40 trials"), database="mine")
    days = ("2026-11-21T01:00:00+00:00", "2026-11-20T23:00:00+00:00", "")
    trials = tuple(
        databases.trial(number, config, created=day)
        for number, (config, day) in enumerate(zip(databases.configs(3), days, strict=True), 1)
    )
    search = Search(log=SearchLog(search=None, trials=trials))
    contents = Contents(databases=(), entries=(entry,), searches=(search,))
    assert figures.runs(contents) == [(RUN, "node7", "40 trials", "2026-11-20", 1, 3)]


def test_a_search_whose_candidates_took_equally_long_says_nothing_of_knobs() -> None:
    assert importances([search_of(*[1.0] * LEAST_TRIALS)]) == ()


def test_what_a_picture_leaves_out_is_said() -> None:
    workloads = [Workload.parse(f"b1-h1-s64-d{16 * n}{causal}") for n in range(1, 17) for causal in ("", "-causal")]
    workloads += [replace(workload, dtype="fp16") for workload in workloads[:10]]
    entries = tuple(entry_of(replace(MEASURED, workload=workload)) for workload in workloads)
    lines = sections.winners(Contents(databases=(), entries=entries)).lines
    assert lines[-1] == "The picture has the first 40 groups; 2 more are not drawn."
    assert "not drawn" not in " ".join(sections.winners(Contents(databases=(), entries=entries[:40])).lines)
    few, many = (sections.convergence((search_of(1.0, 2.0),) * count).lines for count in (24, 25))
    assert len(few) == 2
    assert many[2] == "The 24 with the most trials have a picture of their own; the table has all of them."
    points = [("forward", 32, False, 1.0, "text")] * (charts.MAX_SHOWN + 1)
    assert charts.registers(points).title == "Registers against time of 2001 candidates, 1001 of which are drawn"


def test_curves_tell_when_a_search_had_arrived() -> None:
    (curve,) = figures.curves([search_of(4.0, None, 2.0, 3.0, 1.01, 1.0)])
    assert curve.values == ((1, 4.0), (3, 2.0), (5, 1.01), (6, 1.0))
    assert (curve.arrived, curve.trials, curve.best_ms) == (5, 6, 1.0)
    assert curve.seconds == ((0.5, 4.0), (1.5, 2.0), (2.5, 1.01), (3.0, 1.0))
    assert figures.spread([curve.values, ((2, 1.0),)])[:2] == [(1, 4.0, 4.0), (2, 2.5, 4.0)]
    assert figures.curves([search_of(None)]) == ()
    long = [tuple((place / 7, 1e6 - place) for place in range(5000))]
    assert len(figures.spread(long)) <= figures.MAX_PLACES + 1
    assert figures.spread(long)[-1] == (4999 / 7, 995_001.0, 995_001.0)


def test_times_of_trials_compare_beside_their_reference() -> None:
    search = search_of(1.0, 2.0)
    slow_clock = [
        replace(trial, outcome=replace(trial.outcome, reference_ms=reference))  # type: ignore[type-var]
        for trial, reference in zip(search.trials, (1.0, 4.0), strict=True)
    ]
    compared = Search(log=SearchLog(search=None, trials=tuple(slow_clock)))
    assert [value for _, value in search.measured] == [1.0, 2.0]
    assert [value for _, value in compared.measured] == [2.0, 1.0]


def test_a_race_is_as_close_as_its_next_best(database: Path) -> None:
    contents = read([database])
    (race,) = figures.races(contents.entries)
    lead = 1.26 / math.prod((1.25, 1.2, 1.3)) ** (1 / 3)
    assert (race.rivals, race.lead, race.rounds, race.verdict) == (2, pytest.approx(lead), 3, "97.0%")
    said = " ".join(sections.races(contents).lines)
    assert "Of 1 records whose last race is stored" in said
    assert "1 of 1 races ended with a confidence" in said
    assert "undecided" not in said
    counts = [label.text for label in charts.leads([0.99, 1.0, 1.019, 1.5, 9.0]).labels if label.kind == "value"]
    assert counts == ["1", "1", "1", "0", "0", "0", "2"]


def test_a_race_that_could_not_tell_is_no_winner_with_0_percent(database: Path) -> None:
    """And rivals of several profiles, of which one is stored, are in no figure of leads."""
    entries = [entry for entry in read([database]).entries if entry.origin.runners_up]
    open_race = [with_measurement(entry, confidence=0.0) for entry in entries]
    section = sections.races(replace(read([database]), entries=tuple(open_race)))
    assert "1 ended undecided" in " ".join(section.lines)
    assert section.tables[0].rows[0][-1] == "undecided, 3 rounds"
    profiled = [with_measurement(entry, profile_times_ms=(("ramp", (1.0,) * 3),)) for entry in entries]
    section = sections.races(replace(read([database]), entries=tuple(profiled)))
    assert (section.pictures, section.tables[0].rows[0][3]) == ((), None)
    assert "Of 0 records" in section.lines[0]
    assert "1 more were raced on several profiles" in section.lines[1]


def with_measurement(entry: Entry, **changes: object) -> Entry:
    measurement = replace(entry.record.measurement, **changes)  # type: ignore[arg-type,type-var]
    return replace(entry, record=replace(entry.record, measurement=measurement))


def test_the_knob_that_decides_is_the_important_one(database: Path) -> None:
    searches = read([database]).searches
    first, *others = importances(searches)
    assert (first.knob, first.searches) == ("block_m", 1)
    assert sum(each.share for each in (first, *others)) == pytest.approx(1)
    short = Search(log=SearchLog(search=None, trials=searches[0].trials[: LEAST_TRIALS - 1]))
    assert importances([short]) == ()


def test_pictures_can_be_read_without_colours(database: Path) -> None:
    contents = read([database])
    groups = [figures.Ratios(group=str(ratio), ratios=(ratio,)) for ratio in (0.9, 1.2)]
    assert {mark.shape for mark in charts.torch_ratios(groups).marks} == {"circle", "triangle"}
    (curve,) = figures.curves(contents.searches)
    dashes = {line.kind for line in charts.convergence([curve.values], unit="trials", end=TRIALS).lines}
    assert {"solid", "dashed"} <= dashes
    reasons = [figures.Reason(stage="build", family=f"f{number}", reason="r", count=1) for number in range(3)]
    assert len({bar.hatch for bar in charts.failed_stages(reasons).bars}) == 3


@pytest.mark.parametrize("high", [1.2, 3.0, 12.0, 200.0])
def test_axes_have_some_round_ticks_with_one_among_them(high: float) -> None:
    for is_log in (True, False):
        ticks = Scale(0.8, high, 0, 100, is_log).ticks
        assert 2 <= len(ticks) <= 8
        assert not is_log or 1 in ticks


def test_what_a_stranger_wrote_is_text(tmp_path: Path) -> None:
    contents = read([databases.write_hostile(tmp_path / "theirs.sqlite3")])
    text = page.html(replace(contents, databases=("\u202ereversed\x1b[31m\x07",)), created=MOMENT)
    found = Page(text)
    assert set(found.tags) <= TAGS
    names = {name for name, _ in found.attributes}
    assert not [name for name in names if name.startswith("on") or name in ("src", "srcset", "action", "style")]
    assert {value[0] for name, value in found.attributes if name == "href"} == {"#"}
    assert "<script>document.title='owned'</script>" in found.words  # seen, and not run
    assert "{{ 7 * 7 }}" in found.words
    assert not set(text) & {"\u202e", "\x1b", "\x07"}
    assert "default-src 'none'" in text
    assert len(ATTACKS) == len(re.findall(r"<td data-name=\"stage\">", text))


def test_the_page_loads_nothing(database: Path) -> None:
    text = page.html(read([database]), created=MOMENT)
    assert not re.search(r"https?:|url\((?!#)|@import|<script|<link|<iframe|<object", text)


def test_the_command_writes_a_page(invoke: Invoke, database: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "page.html"
    result = invoke("report", database, "-o", target, "--run", RUN)
    assert result.exit_code == 0, result.output
    assert f"1 record and 1 search written to {target}" in result.stdout
    assert SHORT.key not in target.read_text()
    assert invoke("report", database, "-o", target / "below.html").exit_code == 1
    before = database.read_bytes()
    assert "ends in .html" in invoke("report", database, "-o", database).stderr
    assert database.read_bytes() == before
    assert invoke("report", database, "-o", "a\0b").exit_code == 2
    with pytest.raises(DatabaseError, match="a place that can be written"):
        page.write(read([database]), tmp_path / "a\0b.html")
    assert invoke("report", tmp_path / "none.sqlite3", "-o", target).exit_code == 1
    assert invoke("report", database, "--device", "nothing", "-o", target).exit_code == 2


def test_a_page_that_cannot_be_written_leaves_the_old_one(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "page.html"
    page.write(read([database]), path, created=MOMENT)
    old = path.read_bytes()

    def full(self: Path, text: str, encoding: str) -> None:
        with self.open("w", encoding=encoding) as file:
            file.write(text[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(DatabaseError, match="No space left"):
        page.write(read([database]), path)
    assert path.read_bytes() == old
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]
