"""Databases for reports: searches with all that is stored of them, and one whose every text attacks the page."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from flashgen.codegen.families import family
from flashgen.core.compiled import Compiled
from flashgen.core.config import Config
from flashgen.core.history import Origin, RunnerUp
from flashgen.core.record import Baseline, Failure, Measurement, Trial, Versions
from flashgen.core.search_log import SearchRun
from flashgen.db.store import Store
from flashgen.db.writing import Incoming
from tests.db.samples import CAUSAL, CONFIG, H200, MEASURED, SHORT, WIDE

RUN = "0123456789abcdef"
TRIALS = 40
ATTACKS = (
    "<script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "\"><svg onload=document.title='owned'>",
    "' onmouseover='document.title=1",
    "</style></title><script src=//evil.example/x.js></script>",
    "{{ 7 * 7 }}{% include 'x' %}",
    "javascript:document.title='owned'",
)


def configs(count: int) -> list[Config]:
    """Valid configs of one family that differ in three knobs."""
    knobs = {knob.name: knob.values for knob in family("portable_forward").knobs}
    chance = random.Random(7)
    found: dict[Config, None] = {}
    while len(found) < count:
        values = {name: chance.choice(knobs[name]) for name in ("block_m", "block_n", "num_warps")}
        found[CONFIG.replace(**values)] = None
    return list(found)


def trial(number: int, config: Config, **changes: object) -> Trial:
    """One of a search, whose time follows from `block_m` alone."""
    ms = 1 + abs(int(dict(config.knobs)["block_m"]) - 128) / 100 + number / 1e4
    made = Trial(
        workload=CAUSAL,
        device=H200,
        config=config,
        source="default" if number == 1 else "sampler",
        outcome=Measurement(times_ms=(ms,), reference_ms=2.0),
        created=f"2026-11-20T11:{number:02d}:00+00:00",
        run=RUN,
        number=number,
        compiled=Compiled(registers=100 + number, spills=8 * (number % 7 == 0), shared_bytes=65536, occupancy=2),
        elapsed_s=0.5 * number,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def write(path: Path) -> Path:
    """A file with three records, one of them behind torch, and a search of 40 trials, of which every tenth failed."""
    with Store.open(path) as store:
        slow = replace(MEASURED, workload=SHORT, baselines=(Baseline(impl="sdpa-cudnn", median_ms=1.0),))
        store.put_records([slow, replace(MEASURED, workload=WIDE, baselines=())])
        near, far = configs(2)
        rivals = (RunnerUp(config=near, times_ms=(1.26,) * 3), RunnerUp(config=far, times_ms=(1.5,) * 3))
        made = Origin(run=RUN, host="node7", seed=1, budget="40 trials", runners_up=rivals)
        sure = replace(MEASURED, measurement=replace(MEASURED.measurement, confidence=0.97))
        store.put_record(sure, made)
        store.put_search(SearchRun(workload=CAUSAL, device=H200, run=RUN, host="node7", budget="40 trials"))
        for number, config in enumerate(configs(TRIALS), 1):
            failure = Failure(stage="build", reason=f"needs {number * 1024} bytes of shared memory")
            store.put_trial(trial(number, config, **({"outcome": failure} if number % 10 == 0 else {})))
    return path


def write_hostile(path: Path) -> Path:
    """A file of a stranger: each text of it that no rule narrows is an attack."""
    every = "".join(ATTACKS)
    device = replace(H200, name=every[:190], num_sms=99)
    record = replace(
        MEASURED,
        device=device,
        versions=Versions(flashgen=every, triton=every, torch=every, driver=every),
        baselines=(Baseline(impl=every, median_ms=1.0),),
    )
    with Store.open(path) as store:
        origin = Origin(run=every, host=every, budget=every)
        store.put_records([record], Incoming(origins={record.identity: origin}))
        store.put_search(SearchRun(workload=CAUSAL, device=device, run=every, host=every, budget=every))
        for number, attack in enumerate(ATTACKS, 1):
            failure = Failure(stage="build", reason=attack)
            config = configs(len(ATTACKS))[number - 1]
            store.put_trial(trial(number, config, device=device, run=every, outcome=failure))
        store.put_trial(trial(42, configs(9)[8], device=device, run=every, source="default"))
    return path
