"""Search one op's configurations in one cell, and say what was chosen and why.

1. The pack says what cannot be built, and from which bytes in flight nothing can come; neither is run.
2. Each other configuration is timed for a few blocks against the incumbent; what is surely slower is
   pruned.
3. What is left must pass the kernel tests before it is timed in full and its time counts.
4. The fastest meets the incumbent again in a process of its own, on other inputs, beside the incumbent
   against itself: it must win by more than that, or the incumbent stays.
5. What was chosen passes the op's checks of that shape on inputs that the search did not see.

The order of trials is Optuna's (TPE over the declared axes, seeded; every configuration where there are few).
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NamedTuple

from harness.domain.cell import Cell
from harness.domain.check import Check, Samples, Status
from harness.domain.errors import DeviceMissing, InputError
from harness.domain.pack import Pack
from harness.domain.tuning import (
    Configuration,
    Ending,
    TunablePack,
    TuningSpace,
    TuningStudy,
    TuningTrial,
    words_of,
)
from harness.executors.asked_child import AskedChild, ChildEnded
from harness.executors.sandbox import sandboxed
from harness.stages import kernels
from harness.tuning.comparison import compared, is_surely_slower, judge_held_out
from harness.tuning.trials import TrialJob, trial_command

__all__ = ["Budget", "Desk", "search"]

HELD_OUT_SHIFT = 1_000_003
"""Between seeds of the search and of what it must not see."""
ASKS_PER_TRIAL = 60
"""How often the optimiser may propose what was tried or cannot be built before another is drawn."""
AT_ROOFLINE = 1.05
"""An incumbent within this factor of its floor has nothing to gain."""


class Budget(NamedTuple):
    """How much may be tried."""

    trials: int = 24
    early_blocks: int = 6
    blocks: int = 16
    held_out_blocks: int = 24
    alpha: float = 0.05
    limit_s: float = 600.0
    """Seconds of one cell's search, held-out repeats not counted; trials in hand are finished."""
    ask_s: float = 120.0
    """Seconds of one request to a child."""


@dataclass(frozen=True, slots=True)
class Desk:
    """What a search works with."""

    pack: Pack
    tunable: TunablePack
    policy: str
    folder: Path
    """Jobs and logs."""
    built: Path
    """Kernels compiled ahead; kept from run to run."""
    checks: Callable[[int], Sequence[Check]]
    """Checks of the op's shape for a seed; the first is the searched cell."""
    say: Callable[[str], None]
    processes: int = 2
    """Compilers that run side by side."""


class _Child:
    """The trial child, started again after it was lost."""

    def __init__(self, desk: Desk, job: TrialJob) -> None:
        self._job = desk.folder / "trial.job.json"
        self._job.write_bytes(job.canonical())
        self._log = desk.folder / "trials.log"
        self._child: AskedChild | None = None

    def ask(self, request: Mapping[str, Any], limit_s: float) -> Mapping[str, Any]:
        if self._child is None:
            self._child = AskedChild(sandboxed(trial_command(self._job), OMP_NUM_THREADS="1"), self._log)
        try:
            return self._child.ask(request, limit_s)
        except ChildEnded:
            self.close()
            raise

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


def search(desk: Desk, space: TuningSpace, cell: Cell, model: str, seed: int, budget: Budget) -> TuningStudy:
    """The study of one cell; raises `DeviceMissing` where not even the incumbent runs here."""
    allowed = _allowed(desk, space)
    job = TrialJob(
        pack=desk.pack.name, policy=desk.policy, cell=cell, model=model, space=space, built=str(desk.built)
    )
    child = _Child(desk, job)
    try:
        ceiling = _ceiling(child, budget)
        moved = desk.pack.traffic(space.op, cell, None)[0] if model == desk.pack.claimed_model else None
        runner = _Runner(desk, space, child, budget, seed, ceiling, moved)
        trials = runner.run(allowed)
        return _concluded(desk, space, cell, model, seed, budget, child, runner, trials, len(allowed))
    finally:
        child.close()


class _Runner:
    """Runs trials one after another, and keeps what they are compared with."""

    def __init__(
        self, desk: Desk, space: TuningSpace, child: _Child, budget: Budget, seed: int, ceiling: float,
        moved: int | None,
    ) -> None:  # fmt: skip
        self.desk, self.space, self.child, self.budget, self.seed = desk, space, child, budget, seed
        self.ceiling, self.moved, self.built = ceiling, moved, desk.built
        self.best_ratio, self.incumbent_us = 1.0, 0.0
        self.check = desk.checks(seed)[0]

    @property
    def floor_us(self) -> float | None:
        """Least time of a call by its bytes alone."""
        return None if self.moved is None else self.moved / self.ceiling / 1e3

    def run(self, allowed: Sequence[Configuration]) -> tuple[TuningTrial, ...]:
        """Every trial, in the order in which they were made."""
        others = [c for c in allowed if c != self.space.incumbent]
        order = _Order(self.space, others, self.seed, self.budget.trials)
        self.desk.tunable.build_configurations(
            self.space, [self.space.incumbent, *order.first()], self.built, self.desk.processes
        )
        self.incumbent_us = compared(
            *self.times(self.space.incumbent, 4, self.budget.alpha)[:2], 0.4
        ).incumbent_us
        if self.floor_us is not None and self.incumbent_us <= self.floor_us * AT_ROOFLINE:
            return ()
        trials: list[TuningTrial] = []
        begun = monotonic()
        while len(trials) < self.budget.trials and monotonic() - begun < self.budget.limit_s:
            batch = order.batch(min(self.desk.processes, self.budget.trials - len(trials)))
            if not batch:
                break
            self.desk.tunable.build_configurations(self.space, batch, self.built, self.desk.processes)
            for configuration in batch:
                trial = self._trial(len(trials), configuration)
                trials.append(trial)
                order.tell(trial)
                self.desk.say(
                    f"trial {trial.number}: {words_of(configuration)}: {trial.ending} {trial.words}"
                )
        return tuple(trials)

    def _trial(self, number: int, configuration: Configuration) -> TuningTrial:
        """One configuration, as far as it gets."""
        given: dict[str, Any] = {"number": number, "configuration": configuration}
        if self.moved is not None and self.incumbent_us:
            floor = self.desk.tunable.floor_us(self.space, configuration, self.moved, self.ceiling)
            if floor >= self.incumbent_us:
                words = f"cannot take less than {floor:.2f} us; the incumbent takes {self.incumbent_us:.2f}"
                return TuningTrial(**given, ending=Ending.BELOW_ROOFLINE, words=words)
        try:
            ours, theirs, _ = self.times(configuration, self.budget.early_blocks, self.budget.alpha)
            given["early"] = early = compared(ours, theirs, self.budget.alpha)
            if is_surely_slower(early, self.best_ratio):
                given |= {"incumbent_us": ours, "other_us": theirs}
                return TuningTrial(**given, ending=Ending.SLOW, words=f"{early.ratio:.3f} times as fast")
            given["tests"], wrong = self.tested(configuration, (self.check,))
            if wrong:
                return TuningTrial(**given, ending=Ending.WRONG, words=wrong)
            ours, theirs, _ = self.times(configuration, self.budget.blocks, self.budget.alpha)
        except ChildEnded as error:
            return TuningTrial(**given, ending=Ending.CRASHED, words=str(error)[:600])
        timing = compared(ours, theirs, self.budget.alpha)
        given |= {"timing": timing, "incumbent_us": ours, "other_us": theirs}
        if self.floor_us is not None and timing.other_us < self.floor_us:
            words = f"{timing.other_us:.2f} us; its bytes alone take {self.floor_us:.2f}"
            return TuningTrial(**given, ending=Ending.TOO_FAST, words=words)
        self.best_ratio = max(self.best_ratio, timing.ratio)
        return TuningTrial(**given, ending=Ending.TIMED, words=f"{timing.ratio:.3f} times as fast")

    def tested(
        self, configuration: Configuration, checks: Sequence[Check]
    ) -> tuple[tuple[tuple[str, str], ...], str]:
        """Statuses of kernel checks under a configuration, and the first that is no PASS in words."""
        statuses, wrong = [], ""
        for check in checks:
            asked = {"do": "test", "configuration": configuration, "check": check.model_dump(mode="json")}
            answer = self.child.ask(asked, self.budget.ask_s)
            outcome = kernels.judge(check, Samples.model_validate(answer["samples"]))
            statuses.append((check.id, outcome.status.value))
            if outcome.status is not Status.PASS and not wrong:
                wrong = f"{check.id}: {outcome.status.value}: {outcome.summary}"[:600]
        return tuple(statuses), wrong

    def times(
        self,
        configuration: Configuration,
        blocks: int,
        alpha: float,
        *,
        seed: int = 0,
        has_null: bool = False,
    ) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        asked = {
            "do": "time", "configuration": configuration, "seed": self.seed + seed, "blocks": blocks,
            "has_null": has_null,
        }  # fmt: skip
        times = self.child.ask(asked, self.budget.ask_s)["times"]
        return tuple(times["incumbent"]), tuple(times["other"]), tuple(times.get("null", ()))


class _Order:
    """Which configurations come next: the incumbent's neighbours, a few drawn evenly, then what Optuna
    proposes from their times.
    """

    def __init__(self, space: TuningSpace, allowed: Sequence[Configuration], seed: int, trials: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space, self._source = space, random.Random(seed)
        self._left = dict.fromkeys(allowed)
        self._pending: dict[Configuration, Any] = {}
        near = [c for c in allowed if sum(a != b for a, b in zip(c, space.incumbent, strict=True)) == 1]
        self._source.shuffle(near)
        is_small = len(allowed) <= trials
        drawn = [] if is_small else self._source.sample(list(allowed), max(1, trials // 4))
        self._first = [*allowed] if is_small else [*near[: max(1, trials // 2)], *drawn]
        states = optuna.trial.TrialState
        self._states = {"pruned": states.PRUNED, "fail": states.FAIL}
        startup = max(2, trials // 2)
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup, constant_liar=True)
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._queue = list(self._first)
        self._distributions: dict[str, Any] = {
            axis.name: optuna.distributions.CategoricalDistribution(list(axis.values)) for axis in space.axes
        }

    def first(self) -> Sequence[Configuration]:
        """What will come whatever the times are; may be compiled ahead."""
        return self._first

    def batch(self, count: int) -> list[Configuration]:
        """Up to so many that were not tried; compiled side by side and then tried in turn."""
        found: list[Configuration] = []
        while len(found) < count and (configuration := self._ask()) is not None:
            found.append(configuration)
        return found

    def _ask(self) -> Configuration | None:
        if not self._left:
            return None
        while self._queue:
            configuration = self._queue.pop(0)
            if configuration in self._left:
                return self._enqueued(configuration)
        for _ in range(ASKS_PER_TRIAL):
            proposed = self._study.ask(self._distributions)
            configuration = tuple((axis.name, int(proposed.params[axis.name])) for axis in self._space.axes)
            if configuration in self._left:
                del self._left[configuration]
                self._pending[configuration] = proposed
                return configuration
            self._study.tell(proposed, state=self._states["fail"])
        return self._enqueued(self._source.choice(list(self._left)))

    def tell(self, trial: TuningTrial) -> None:
        """How it ended; what was pruned or wrong has no value."""
        proposed = self._pending.pop(trial.configuration)
        if trial.ending is Ending.TIMED and trial.timing is not None:
            self._study.tell(proposed, trial.timing.ratio)
        elif trial.ending is Ending.SLOW and trial.early is not None:
            proposed.report(trial.early.ratio, step=0)
            self._study.tell(proposed, state=self._states["pruned"])
        else:
            self._study.tell(proposed, state=self._states["fail"])

    def _enqueued(self, configuration: Configuration) -> Configuration:
        self._study.enqueue_trial(dict(configuration))
        self._pending[configuration] = self._study.ask(self._distributions)
        del self._left[configuration]
        return configuration


def _allowed(desk: Desk, space: TuningSpace) -> tuple[Configuration, ...]:
    names = [axis.name for axis in space.axes]
    every = (tuple(zip(names, values, strict=True)) for values in product(*(a.values for a in space.axes)))
    allowed = tuple(c for c in every if not desk.tunable.refused(space, c))
    if space.incumbent not in allowed:
        raise InputError(
            f"the pack refuses its own choice for {space.kernel} ({words_of(space.incumbent)}: "
            f"{desk.tunable.refused(space, space.incumbent)}); mend its tuning space"
        )
    return allowed


def _ceiling(child: _Child, budget: Budget) -> float:
    try:
        return float(child.ask({"do": "ceiling"}, budget.ask_s)["gb_per_s"])
    except ChildEnded as error:
        raise DeviceMissing(f"nothing can be timed here: the child that times {error}") from error


def _concluded(
    desk: Desk, space: TuningSpace, cell: Cell, model: str, seed: int, budget: Budget, child: _Child,
    runner: _Runner, trials: tuple[TuningTrial, ...], size: int,
) -> TuningStudy:  # fmt: skip
    """Steps 4 and 5."""
    given: dict[str, Any] = {
        "space": space, "cell": cell, "model": model, "seed": seed, "trials": trials, "space_size": size,
        "ceiling_gb_per_s": runner.ceiling, "floor_us": runner.floor_us,
    }  # fmt: skip
    timed = [t for t in trials if t.timing is not None and t.ending is Ending.TIMED]
    best = max(timed, key=lambda t: t.timing.ratio if t.timing else 0.0, default=None)
    verdict: Literal["improved", "confirmed", "demoted", "at_the_roofline", "not_judged"] = "confirmed"
    chosen, words = space.incumbent, "no trial was faster than the incumbent"
    if not trials and runner.floor_us is not None and runner.incumbent_us <= runner.floor_us * AT_ROOFLINE:
        verdict, words = "at_the_roofline", f"{runner.incumbent_us:.2f} us of at least {runner.floor_us:.2f}"
    if best is not None and best.timing is not None and best.timing.ratio > 1.0:
        child.close()  # held-out repeats have a process of their own
        try:
            ours, theirs, null = runner.times(
                best.configuration, budget.held_out_blocks, budget.alpha, seed=HELD_OUT_SHIFT, has_null=True
            )
        except ChildEnded as error:
            verdict, words = "demoted", f"held-out repeats of trial {best.number}: {error}"[:600]
        else:
            held_out, against = (compared(ours, other, budget.alpha) for other in (theirs, null))
            verdict, words = judge_held_out(held_out, against)
            words = f"trial {best.number} ({words_of(best.configuration)}): {words}"
            given |= {
                "held_out": held_out, "null": against, "held_out_seed": seed + HELD_OUT_SHIFT,
                "held_out_incumbent_us": ours, "held_out_other_us": theirs, "held_out_null_us": null,
            }  # fmt: skip
            chosen = best.configuration if verdict == "improved" else chosen
    tests: tuple[tuple[str, str], ...] = ()
    wrong = ""
    try:
        tests, wrong = runner.tested(chosen, desk.checks(seed + HELD_OUT_SHIFT))
    except ChildEnded as error:
        wrong = str(error)[:600]
    if wrong and chosen != space.incumbent:
        verdict, words, chosen = "demoted", f"{words}; held-out test: {wrong}"[:900], space.incumbent
        tests, wrong = runner.tested(chosen, desk.checks(seed + HELD_OUT_SHIFT))
    if wrong:
        verdict, words = "not_judged", f"the incumbent itself does not pass: {wrong}"[:900]
    number = None if best is None else best.number
    return TuningStudy(**given, best=number, verdict=verdict, words=words, chosen=chosen, chosen_tests=tests)
