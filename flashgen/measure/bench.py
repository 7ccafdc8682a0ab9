"""`Bench`: one GPU's workloads with their inputs and right answers, and candidates that have passed the gate."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import FlashgenError
from flashgen.core.record import Failure
from flashgen.core.workload import Specialization, Workload
from flashgen.launch.sdpa import BACKENDS
from flashgen.measure.data_kinds import NORMAL, hard_kind
from flashgen.measure.directions import VerificationCase, direction_of
from flashgen.measure.inputs import rotation_copies
from flashgen.measure.mixed_case import TwoLaunches, steps_of
from flashgen.measure.odd_shapes import Factory, Titled, check_odd
from flashgen.measure.protocol import specialization
from flashgen.measure.timing import Run, Stopwatch, Unit, make_unit
from flashgen.measure.toolchain import Toolchain
from flashgen.measure.verification_case import VerificationCase as ForwardCase
from flashgen.measure.verify import Errors

INPUT_SEED = 20260102

DEFAULT = "default config"
"""The name of the reference that stands in where none of torch's backends can run."""

Announce = Callable[[str], None]
"""Says which stage (build, verify, launch) comes next."""


@dataclass(slots=True, kw_only=True)
class State:
    """What all candidates of one workload share.

    `baselines` holds what was made ready of torch's backends and, where none can run, of the default config, by name;
    None is what cannot run. `hard` is the workload on its hard data, once that was asked for. `profiles` are the other
    profiles of lengths that decoding and packed sequences are measured on, by name; `problem` is the first one.
    """

    workload: Workload
    problem: VerificationCase
    baselines: dict[str, Unit | None]
    hard: VerificationCase | None = None
    profiles: dict[str, VerificationCase] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Device memory held, in bytes."""
        cases = [self.problem, *self.profiles.values(), *([self.hard] if self.hard else [])]
        return sum(case.nbytes for case in cases)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A kernel that has passed the gate: its errors on the workload, how to time it, and how to judge it again.

    `hard_run` is there if it was asked for on hard data as well, and `profile_runs` has those on other profiles of
    lengths, by name.
    """

    errors: Errors
    run: Run
    check: Callable[[], Errors | Failure]
    hard_run: Run | None = None
    profile_runs: dict[str, Run] = field(default_factory=dict)


class Bench:
    """Keeps inputs and right answers of recent workloads, and remembers which configs passed the odd shapes."""

    def __init__(
        self, device: Device, where: torch.device, toolchain: Toolchain, stopwatch: Stopwatch, keep_bytes: float
    ) -> None:
        """Nothing is allocated yet.

        Args:
            device: what the inputs' rotation depends on (its L2 size).
            where: the torch device.
            toolchain: builds kernels.
            stopwatch: times torch's backends' first windows.
            keep_bytes: device memory that states of earlier workloads may hold.
        """
        self._device = device
        self._where = where
        self._toolchain = toolchain
        self._stopwatch = stopwatch
        self._keep_bytes = keep_bytes
        self._states: OrderedDict[Workload, State] = OrderedDict()
        self._odd: OrderedDict[tuple[Specialization, int | None], Sequence[tuple[Titled, VerificationCase]]] = (
            OrderedDict()
        )
        self._odd_verdicts: dict[tuple[Specialization, Config], Failure | None] = {}

    def state(self, workload: Workload) -> State:
        """The inputs and right answers of a workload, made once and kept while there is room.

        Raises:
            UnsupportedError: the workload has a feature that cannot be measured.
        """
        if workload in self._states:
            self._states.move_to_end(workload)
            return self._states[workload]
        try:
            state = self._make_state(workload)
        except torch.OutOfMemoryError:
            self.release()
            state = self._make_state(workload)
        self._states[workload] = state
        while len(self._states) > 1 and sum(each.nbytes for each in self._states.values()) > self._keep_bytes:
            self._states.popitem(last=False)
        return state

    def hard_case(self, state: State) -> VerificationCase | None:
        """The workload on its hard data, made once; None where it has none, or memory does not suffice for both."""
        data = hard_kind(state.workload)
        if state.hard is None and data is not None:
            state.hard = self._hard_case(state.workload, data)
            if state.hard is None:
                self.release()
                self._states[state.workload] = state
                state.hard = self._hard_case(state.workload, data)
        return state.hard

    def candidate(
        self, state: State, config: Config, announce: Announce, hard: VerificationCase | None = None
    ) -> Candidate | Failure:
        """Build a config and put it through the gate: the odd shapes (once), the workload itself, and its hard data.

        Of a config whose LSE is not exact, its exact sibling passes the gate first, and then its own output alone.

        Raises:
            Exception: whatever building and running it raises; the stage has been announced.
        """
        spec = specialization(state.workload)
        exact = self._toolchain.exact_sibling(spec, config)
        if (out_alone := exact != config) and isinstance(
            failed := self.candidate(state, exact, announce, hard), Failure
        ):
            return Failure(stage=failed.stage, reason=f"with an LSE, by {exact}: {failed.reason}")
        announce("build")
        factory = self._toolchain.factory(spec, config)
        announce("verify")
        repeats = direction_of(spec).repeats if self._toolchain.is_deterministic(config) else 0
        odd = self._odd_verdict(spec, config, factory, repeats, out_alone=out_alone)
        if odd is not None:
            return odd

        def check() -> Errors | Failure:
            verdict = state.problem.run(factory, repeats, out_alone=out_alone)
            for name, case in state.profiles.items():
                if not isinstance(verdict, Failure):
                    verdict = _on(
                        "lengths of the profile " + name, case.run(factory, repeats, out_alone=out_alone), verdict
                    )
            if hard is None or isinstance(verdict, Failure):
                return verdict
            return _on("hard data", hard.run(factory, repeats, out_alone=out_alone), verdict)

        verdict = check()
        if isinstance(verdict, Failure):
            return verdict
        hard_run = None if hard is None else hard.timed(factory)
        return Candidate(
            errors=verdict,
            run=state.problem.timed(factory),
            check=check,
            hard_run=hard_run,
            profile_runs={name: case.timed(factory) for name, case in state.profiles.items()},
        )

    def sdpa(self, state: State, impl: str) -> Unit | None:
        """One of torch's backends on the workload, or None if it cannot run it or computes something else."""
        if impl not in state.baselines:
            state.baselines[impl] = self._sdpa_unit(state, impl)
        return state.baselines[impl]

    def split(self, state: State, config: Config) -> Unit | None:
        """A mixed batch in two launches, the chunks by this config and its steps of decoding by the default of theirs.

        None where the workload is no such batch, or where that cannot run or computes something else.
        """
        steps = steps_of(state.workload)
        if steps is None or not isinstance(state.problem, ForwardCase):
            return None
        with contextlib.suppress(FlashgenError, RuntimeError):
            decode = self._toolchain.factory(specialization(steps), self._toolchain.default(steps))
            prefill = self._toolchain.factory(specialization(state.workload), config)
            both = TwoLaunches(case=state.problem, steps=steps, prefill=prefill, decode=decode)
            if both.verified() is None:
                return make_unit(both.run(), state.problem.copies, self._stopwatch)
        return None

    def reference(self, state: State) -> Unit | None:
        """What all windows of a workload are levelled by.

        It is the first of torch's backends that can run the workload (flash wherever it can), or else the default
        config, which is the same kernel in every session; None if that fails as well, and then times stay as they are.
        """
        units = (self.sdpa(state, impl) for impl in BACKENDS)
        return next((unit for unit in units if unit is not None), None) or self._default_unit(state)

    def release(self) -> None:
        """Give back all device memory that is only kept for speed."""
        self._states.clear()
        self._odd.clear()
        if self._where.type == "cuda":
            torch.cuda.empty_cache()

    def _make_state(self, workload: Workload) -> State:
        first, *others = workload.profiles or (workload,)
        return State(
            workload=workload,
            problem=self._problem(first, NORMAL),
            baselines={},
            profiles={each.lengths: self._problem(each, NORMAL) for each in others},
        )

    def _hard_case(self, workload: Workload, data: str) -> VerificationCase | None:
        try:
            return self._problem(workload, data)
        except torch.OutOfMemoryError:
            return None

    def _problem(self, workload: Workload, data: str) -> VerificationCase:
        copies = rotation_copies(workload, self._device.l2_bytes)
        return direction_of(workload).problem(workload, copies, INPUT_SEED, self._where, data)

    def _odd_verdict(
        self, spec: Specialization, config: Config, factory: Factory, repeats: int, *, out_alone: bool
    ) -> Failure | None:
        key, most = (spec, config), self._toolchain.most_keys(config)
        if key not in self._odd_verdicts:
            if (spec, most) not in self._odd:
                limit = {} if most is None else {"most_keys": most}
                self._odd[spec, most] = direction_of(spec).odd_problems(spec, self._where, **limit)
            self._odd_verdicts[key] = check_odd(factory, self._odd[spec, most], repeats, out_alone=out_alone)
        return self._odd_verdicts[key]

    def _sdpa_unit(self, state: State, impl: str) -> Unit | None:
        if self._where.type != "cuda":
            return None
        found = direction_of(state.workload).baseline(impl, state.workload, state.problem)
        if isinstance(found, str):
            return None
        try:
            return make_unit(found.run, state.problem.copies, self._stopwatch, found.context)
        except RuntimeError:  # it cannot be recorded into a graph, and would be timed with the host's time
            return None

    def _default_unit(self, state: State) -> Unit | None:
        if DEFAULT not in state.baselines:
            state.baselines[DEFAULT] = None
            with contextlib.suppress(FlashgenError, RuntimeError):  # it has its turn as a candidate, and fails there
                config = self._toolchain.default(state.workload)
                candidate = self.candidate(state, config, lambda stage: None)
                if isinstance(candidate, Candidate):
                    state.baselines[DEFAULT] = make_unit(candidate.run, state.problem.copies, self._stopwatch)
        return state.baselines[DEFAULT]


def _on(what: str, verdict: Errors | Failure, errors: Errors) -> Errors | Failure:
    """The failure on other inputs of a config that passed on the usual ones, or its errors on both."""
    if isinstance(verdict, Failure):
        return Failure(stage=verdict.stage, reason=f"on {what}: {verdict.reason}")
    return errors
