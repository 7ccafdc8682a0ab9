"""A cost model that learns: what it is told of candidates, what it finds, and a search that it proposes for."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from pathlib import Path

import pytest

from flashgen.codegen.families import DECODE_FAMILIES, FAMILIES
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.record import Failure, Measurement, Trial
from flashgen.core.search_log import SearchLog, SearchRun
from flashgen.core.workload import Workload
from flashgen.db.layers import Layers
from flashgen.db.log_files import write_log
from flashgen.db.store import Store
from flashgen.tuning import known_searches, learned_cost
from flashgen.tuning.candidates import Candidates
from flashgen.tuning.cost_inputs import rows_of
from flashgen.tuning.known_searches import learned_from, shipped_tables
from flashgen.tuning.learned_cost import FAILED, LearnedCost, WorkloadCost
from flashgen.tuning.search import EXPLORE_EVERY, Search
from flashgen.tuning.tune import tune
from tests.tiers import EXHAUSTIVE, every, first
from tests.tuning.fakes import H200, FakeCompiler, FakeExecutor
from tests.tuning.runs import Budget, Options, chosen

SHORT = Workload.parse("b4-h16-s2048-d128")
LONG = Workload.parse("b4-h16-s8192-d128")
CANDIDATES = Candidates.of(SHORT, H200, ("hopper_forward",))
(SPACE,) = CANDIDATES.spaces
A100 = find_device("a100")


def time_ms(config: Config, workload: Workload = SHORT) -> float:
    """A made-up time: two warpgroups and wide blocks are best, and longer sequences take longer."""
    slow = 1.3 * (config["warpgroups"] != 2) + 0.2 * (config["block_n"] != 128) + 0.1 * (config["v_stages"] != 2)
    return workload.seqlen_k / 1000 * (1 + slow + 0.05 * (config["barriers"] == "mbarrier"))


def outcome(config: Config, workload: Workload = SHORT) -> Measurement | Failure:
    if config["exp_order"] == "barrier":
        return Failure(stage="verify", reason="planted")
    return Measurement(times_ms=(time_ms(config, workload),))


def log(
    workload: Workload = LONG, device: object = H200, configs: tuple[Config, ...] = SPACE.configs[::7]
) -> SearchLog:
    search = SearchRun(workload=workload, device=device, run="r1", settings=(("families", "hopper_forward"),))  # type: ignore[arg-type]
    trials = tuple(
        Trial(
            workload=workload,
            device=device,  # type: ignore[arg-type]
            config=config,
            source="random",
            outcome=outcome(config, workload),
            run="r1",
            number=number,
        )
        for number, config in enumerate(configs, 1)
    )
    return SearchLog(search=search, trials=trials, finalists=())


def model(*logs: SearchLog, **without: bool) -> WorkloadCost:
    found = LearnedCost(logs).of(SHORT, H200, **without)  # type: ignore[arg-type]
    assert found is not None
    return found


# --- what it is told -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "device"),
    every(
        2,
        [
            ("fwd-bf16-b4-h16-s4096-d128-causal", "h200"),
            ("fwd-bf16-b4-h16-s4096-d128-causal", "mi300x"),
            ("bwd-fp16-b1-h32-hk8-s1000-d64-wl512-causal", "b200"),
            ("fwd-fp32-b1-h4-sq7-sk900-d64-bias-mask", "rtx 4090"),
            ("b16-h32-hk8-tq32768-s8192-d128-causal-varlen", "a100"),
            ("dec-bf16-b64-h32-hk8-sk8192-d128", "a100"),
        ],
    ),
)
def test_all_candidates_have_finite_rows_of_one_length(key: str, device: str) -> None:
    workload, where = Workload.parse(key), find_device(device)
    every = [space.configs[:: max(len(space.configs) // 20, 1)] for space in Candidates.of(workload, where).spaces]
    rows = rows_of(workload, where, [config for configs in every for config in configs])
    assert len({len(row) for row in rows}) == 1
    assert all(math.isfinite(value) for row in rows for value in row)


def test_configs_that_differ_have_rows_that_differ() -> None:
    rows = {tuple(row) for row in rows_of(SHORT, H200, SPACE.configs)}
    assert len(rows) == len(SPACE.configs)
    families = {config.family for row in (*FAMILIES, *DECODE_FAMILIES) for config in [Config.of(row.id, {})]}
    assert families >= {"hopper_forward", "portable_decode"}


# --- what it finds ---------------------------------------------------------------------------------------------------


def test_it_tells_the_good_of_a_workload_that_it_has_not_seen() -> None:
    expected = model(log()).expected(SPACE.configs, ())
    assert expected is not None
    ranked = [config for _, config in sorted(zip(expected, SPACE.configs, strict=True), key=lambda pair: pair[0])]
    best = min(time_ms(config) for config in SPACE.configs)
    assert statistics.mean(time_ms(config) / best for config in ranked[:10]) < 1.05
    assert statistics.mean(time_ms(config) / best for config in SPACE.configs) > 1.5


def test_what_fails_is_expected_to_fail() -> None:
    expected = model(log()).expected(SPACE.configs, ())
    assert expected is not None
    by_outcome = {bad: [value for value, config in zip(expected, SPACE.configs, strict=True) if _fails(config) == bad]
                  for bad in (True, False)}  # fmt: skip
    assert statistics.mean(by_outcome[True]) > statistics.mean(by_outcome[False]) + 0.2
    assert max(expected) <= FAILED


def _fails(config: Config) -> bool:
    return isinstance(outcome(config), Failure)


def test_trials_of_its_own_search_overrule_those_of_others() -> None:
    """Others say that two warpgroups are best; here they are worst."""
    learned = model(log())
    two, three = ([c for c in SPACE.configs if c["warpgroups"] == count] for count in (2, 3))
    told = [(config, math.log(9.0)) for config in two[:30]] + [(config, math.log(1.0)) for config in three[:30]]
    before, after = learned.expected([two[40], three[40]], ()), learned.expected([two[40], three[40]], told)
    assert before is not None
    assert after is not None
    assert before[0] < before[1]
    assert after[0] > after[1]


def test_nothing_is_expected_of_too_few_trials() -> None:
    alone = model()
    assert alone.expected(SPACE.configs, ()) is None
    few = [(config, 0.0) for config in SPACE.configs[:3]]
    assert alone.expected(SPACE.configs, few) is None
    failed = [(config, None) for config in SPACE.configs[:30]]
    assert alone.expected(SPACE.configs, failed) is None, "of failures alone nothing follows"
    assert model(log()).expected([], ()) is None
    assert alone.expected(SPACE.configs, [(config, math.log(time_ms(config))) for config in SPACE.configs[:20]])


@pytest.mark.parametrize("seed", [-1, 2**32, 2**63 - 1])
def test_any_seed_of_a_search_serves(seed: int) -> None:
    found = LearnedCost([log()]).of(SHORT, H200, seed=seed)
    assert found is not None
    assert found.expected(SPACE.configs[:5], ()) is not None


def test_a_device_or_a_workload_is_left_out_on_demand() -> None:
    logs = log(), log(SHORT), log(LONG, A100)
    assert model(*logs).size == 3 * len(logs[0].trials)
    assert model(*logs, without_device=True).size == len(logs[0].trials)
    assert model(*logs, without_workload=True).size == 2 * len(logs[0].trials)


def test_a_search_without_a_time_or_a_name_teaches_nothing() -> None:
    failed = tuple(dataclasses.replace(t, outcome=Failure(stage="build", reason="x")) for t in log().trials)
    assert LearnedCost([dataclasses.replace(log(), trials=failed)]).lessons == ()
    assert LearnedCost([dataclasses.replace(log(), search=None)]).lessons == ()


def test_trials_that_no_search_makes_teach_nothing() -> None:
    """A file of others may have a config of a backward family in a search for a forward pass."""
    backward = Candidates.of(Workload.parse("bwd-b4-h16-s2048-d128"), H200).default
    strange = dataclasses.replace(log().trials[0], config=backward)
    (lesson,) = LearnedCost([dataclasses.replace(log(), trials=(strange, *log().trials))]).lessons
    assert len(lesson.rows) == len(log().trials)
    assert LearnedCost([dataclasses.replace(log(), trials=(strange,))]).lessons == ()


def test_the_nearest_workloads_are_learned_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    far, near = log(Workload.parse("b1-h1-s64-d128")), log(Workload.parse("b4-h16-s2176-d128"))
    monkeypatch.setattr(learned_cost, "MOST_ROWS", len(near.trials))
    found = model(far, near)
    assert found._rows == list(LearnedCost([near]).lessons[0].rows)


# --- searches --------------------------------------------------------------------------------------------------------


def search_with(points: int, trials: tuple[Trial, ...] = (), **options: object) -> list[Trial]:
    search = Search([SPACE], seed=2, model=model(log()), trials=trials, **options)  # type: ignore[arg-type]
    found = []
    for _ in range(points):
        proposal = search.ask()
        assert proposal is not None
        result = outcome(proposal.config)
        search.tell(proposal.config, result)
        found.append(Trial(workload=SHORT, device=H200, config=proposal.config, source=proposal.source, outcome=result))
    return found


def test_most_points_are_the_models_and_some_are_not() -> None:
    sources = [trial.source for trial in search_with(40)]
    assert sources.count("learned") == 40 - 40 // EXPLORE_EVERY
    best = min(time_ms(config) for config in SPACE.configs if not _fails(config))
    first = [trial for trial in search_with(5) if trial.source == "learned"]
    assert min(time_ms(trial.config) for trial in first) / best < 1.05


@pytest.mark.parametrize("stopped_after", first(1, [5, 3, 12]))
def test_a_resumed_search_goes_on_as_the_stopped_one_would_have(stopped_after: int) -> None:
    whole = search_with(20)
    again = search_with(20 - stopped_after, tuple(whole[:stopped_after]))
    assert [trial.config for trial in again] == [trial.config for trial in whole[stopped_after:]]


def test_starts_are_in_the_order_of_the_model_behind_those_that_need_none() -> None:
    by_time = sorted((config for config in SPACE.configs if not _fails(config)), key=time_ms)
    slow, middle, fast = by_time[-4:], by_time[len(by_time) // 2], by_time[0]
    first = [
        *zip(slow, ("default", "incumbent", "neighbour", "neighbour"), strict=True),
        (middle, "seed"),
        (fast, "neighbour"),
    ]
    assert [trial.config for trial in search_with(6, first=first)] == [*slow, fast, middle]


def test_without_the_package_the_sampler_searches_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert LearnedCost([log()]).of(SHORT, H200) is None
    with Layers.open([]) as layers:
        assert learned_from(layers) is None


def test_to_learn_and_to_rank_take_less_than_a_trial() -> None:
    """1,400 trials and 1,500 candidates: CPU seconds of one core, every REFIT_EVERY trials."""
    known = model(
        *[
            log(Workload.parse(f"b4-h16-s{length}-d128"), configs=SPACE.configs[:350])
            for length in range(1024, 5120, 1024)
        ]
    )
    known.expected(SPACE.configs[:1500], ())
    began = time.process_time()
    known.expected(SPACE.configs[:1500], ())
    assert time.process_time() - began < 2.0


# --- runs ------------------------------------------------------------------------------------------------------------


@EXHAUSTIVE
def test_a_run_stores_what_the_model_proposed_and_what_it_had_learned(tmp_path: Path) -> None:
    executor = FakeExecutor()
    with Store.open(tmp_path / "db.sqlite3") as store:
        for nothing, least in ((False, 1), (True, 0)):
            tune(
                [SHORT],
                device=H200,
                store=store,
                compiler=FakeCompiler(),
                executor=executor,
                budget=Budget(trials=60),
                options=Options(families=("hopper_forward",), from_nothing=nothing, retune=True),
                clock=executor.clock,
                learned=LearnedCost([log()]),
                run=f"run {nothing}",
            )
            assert chosen(store, SHORT).config in SPACE.configs
            (search,) = [each for each in store.searches(SHORT, H200) if each.run == f"run {nothing}"]
            assert dict(search.settings)["lessons"] == least * len(log().trials)
            own = [trial for trial in store.trials(SHORT, H200) if trial.run == f"run {nothing}"]
            assert "learned" in {trial.source for trial in own}
            assert (own[0].source == "learned") is False


def test_shipped_tables_and_stored_searches_are_learned_and_bad_files_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "some_device" / "replays"
    folder.mkdir(parents=True)
    write_log(log(), folder / "good.jsonl.gz")
    (folder / "bad.jsonl.gz").write_bytes(b"no gzip")
    monkeypatch.setattr(known_searches, "shipped", lambda name: tmp_path)
    with Store.open(tmp_path / "own.sqlite3") as store:
        store.put_search(log(SHORT).search)  # type: ignore[arg-type]
        for trial in log(SHORT).trials:
            store.put_trial(trial)
    with (
        Layers.open([tmp_path / "own.sqlite3"]) as layers,
        pytest.warns(UserWarning, match="nothing is learned from a table: .*bad"),
    ):
        learned = learned_from(layers)
    assert learned is not None
    assert [lesson.workload for lesson in learned.lessons] == [LONG, SHORT]


def test_a_search_without_the_family_that_serves_teaches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_searches, "shipped", lambda name: tmp_path)
    (portable,) = Candidates.of(SHORT, H200, ("portable_forward",)).spaces
    with Store.open(tmp_path / "own.sqlite3") as store:
        for run, families in (("r1", "portable_forward"), ("r2", "portable_forward hopper_forward"), ("r3", "")):
            made = log(SHORT, configs=SPACE.configs[:2])
            store.put_search(dataclasses.replace(made.search, run=run, settings=(("families", families),)))  # type: ignore[type-var]
            for trial, config in zip(made.trials, portable.configs, strict=False):
                timed = Measurement(times_ms=(SHORT.seqlen_k / 1000,))
                store.put_trial(dataclasses.replace(trial, run=run, config=config, outcome=timed))
    with Layers.open([tmp_path / "own.sqlite3"]) as layers:
        learned = learned_from(layers)
    assert learned is not None
    assert len(learned.lessons) == 2


def test_every_table_that_ships_with_a_time_is_a_lesson() -> None:
    tables = [log for log in shipped_tables() if any(isinstance(t.outcome, Measurement) for t in log.trials)]
    assert len(tables) >= 59
    assert len(LearnedCost(tables).lessons) == len(tables)
