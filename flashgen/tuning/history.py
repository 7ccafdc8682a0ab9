"""What earlier runs left for a workload: a current record, an incumbent to beat, the trials of a stopped search."""

from __future__ import annotations

from collections.abc import Callable

from flashgen.codegen.render import source_digest
from flashgen.core.errors import FlashgenError
from flashgen.core.record import Failure, Limits, Prediction, Trial, TuningRecord, Versions, moment
from flashgen.core.staleness import changed, why_stale
from flashgen.core.workload import Workload
from flashgen.tuning.context import Context


def is_current(record: TuningRecord) -> bool:
    """Whether the template still gives the source that the record was made with; not if it gives none any more.

    With what it was compiled and measured is another question: `why_not_current`.
    """
    try:
        return source_digest(record.workload, record.config) == record.source_digest
    except FlashgenError:
        return False


def why_not_current(
    record: TuningRecord, versions: Versions | None = None, limits: Limits | None = None
) -> tuple[str, ...]:
    """Why a record's time need not be today's: its kernel, the software or the card has changed; empty if none has.

    `versions` and `limits` are those of today; None is not known, and no reason.
    """
    changed = () if is_current(record) else ("its kernel is generated no more as it was",)
    return (*changed, *why_stale(record, versions, limits))


def current_record(context: Context, workload: Workload, *, predicted: bool = False) -> TuningRecord | None:
    """The record of the run's own database that makes another search needless, if there is one.

    A prediction is enough only for a run that measures nothing itself (`predicted`).
    """
    record = context.store.record(workload, context.device)
    enough = record is not None and (predicted or record.provenance == "measured")
    if record is None or not enough:
        return None
    return None if why_not_current(record, context.versions, context.limits) else record


def incumbent(context: Context, workload: Workload) -> TuningRecord | None:
    """What is served for the workload today: the own database's measured record, else another layer's.

    A search from nothing is told of its own database alone, so that in a new one it knows nothing.
    """
    own = context.store.record(workload, context.device)
    known = [own] if own else []
    known += (
        []
        if context.options.from_nothing
        else [
            record
            for record in context.neighbours(workload.specialization.workload_class)
            if record.workload == workload and context.device.may_use(record.device)
        ]
    )
    known.sort(key=lambda record: record.device.identity != context.device.identity)
    return next((record for record in known if record.provenance == "measured"), None)


def served_elsewhere(context: Context, workload: Workload) -> TuningRecord | None:
    """What another GPU of the architecture has for the workload, and serves where this one has no record near it.

    A search may not do worse than no search, so it has to meet the best in a race. It is no incumbent: who wins on its
    device says less than a race here, be it a short one. A search from nothing is not told of it.
    """
    if context.options.from_nothing:
        return None
    records = context.neighbours(workload.specialization.workload_class)
    same = (record for record in records if record.workload == workload and record.device.arch == context.device.arch)
    return next((record for record in same if record.provenance == "measured"), None)


def unfinished_trials(context: Context, workload: Workload) -> list[Trial]:
    """The trials since the last measured record, oldest first: those of searches that did not come to their end.

    Of several of one config the last one counts: it may have failed in finals that were stopped. A search of some
    families goes on from trials of these alone, one from nothing from trials of searches from nothing, and none from
    trials of other software than today's. Where nothing was valid, the same command goes on with what is left, and a
    run that is told to search again tries everything again: what failed may have been the machine's fault.
    """
    record = context.store.record(workload, context.device)
    since = moment(record.created if record is not None and record.provenance == "measured" else "")
    families, may_go_on = context.options.families, _goes_on_from(context, workload)
    trials = [
        trial
        for trial in context.store.trials(workload, context.device)
        if moment(trial.created) > since and (not families or trial.config.family in families) and may_go_on(trial.run)
    ]
    last = {trial.config: trial for trial in sorted(trials, key=lambda trial: moment(trial.created))}
    if context.options.retune and all(isinstance(trial.outcome, Failure) for trial in last.values()):
        return []
    return sorted(last.values(), key=lambda trial: moment(trial.created))


def _goes_on_from(context: Context, workload: Workload) -> Callable[[str], bool]:
    """Whether the trials of a run are those of this search, too.

    They are not where other software measured them, nor where lists or records began them and this one is from nothing.
    Of a run of which that is not known, the latter is taken and the former is not.
    """
    searches = {search.run: search for search in context.store.searches(workload, context.device)}

    def may(run: str) -> bool:
        search = searches.get(run)
        if context.options.from_nothing and (search is None or not dict(search.settings).get("from_nothing")):
            return False
        return search is None or not any(changed(search.versions, context.versions))

    return may


def unfinished_predictions(context: Context, workload: Workload) -> list[Prediction]:
    """The predictions since the last predicted record, oldest first: those of a ranking that was stopped.

    Where nothing was valid, a run that is told to search again tries everything again.
    """
    record = context.store.record(workload, context.device, provenance="predicted")
    since = moment(record.created if record is not None else "")
    found = [each for each in context.store.predictions(workload, context.device) if moment(each.created) > since]
    if context.options.retune and all(isinstance(each.outcome, Failure) for each in found):
        return []
    return sorted(found, key=lambda each: moment(each.created))
