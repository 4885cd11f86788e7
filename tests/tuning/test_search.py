"""A search counts no time of a wrong configuration, keeps every trial, and believes no lucky winner."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.domain.cell import Cell
from harness.domain.check import Check, StageName, Status
from harness.domain.errors import InputError
from harness.domain.tuning import Configuration, Ending, TunedTable, TuningAxis, TuningSpace, TuningStudy
from harness.executors.asked_child import ChildEnded
from harness.tuning import search as searching
from harness.tuning.comparison import compared, judge_held_out
from harness.tuning.run import parse_label
from harness.tuning.search import Budget, Desk, search

CELL = Cell(arch="cpu", batch=2, context=64)
SPACE = TuningSpace(
    kernel="mix", op="mix", implementation="cpu", shape=(("tokens", 2),),
    axes=(TuningAxis(name="chunk", values=(1, 2, 4, 8, 16, 32)),), incumbent=(("chunk", 4),),
)  # fmt: skip
CHECK = Check(id="kernels/mix/toy/cell", stage=StageName.KERNELS, proves="It is right.", cell=CELL, cost_s=0)
WOBBLE = (0.99, 1.0, 1.01, 1.0)


class Child:
    """Answers as a trial child would, from a table of what each chunk takes; `none` crashes."""

    def __init__(
        self, us: Mapping[int, float | None], held_out: Mapping[int, float], wrong: Sequence[int], rate: float
    ) -> None:
        self.us, self.held_out, self.wrong, self.rate = us, held_out, wrong, rate
        self.asked: list[tuple[str, int]] = []

    def ask(self, request: Mapping[str, Any], limit_s: float) -> Mapping[str, Any]:
        if request["do"] == "ceiling":
            return {"gb_per_s": self.rate}
        chunk = request["configuration"][0][1]
        self.asked.append((request["do"], chunk))
        if request["do"] == "test":
            status = Status.FAIL if chunk in self.wrong else Status.PASS
            return {"samples": {"check": CHECK.id, "tier": "smoke", "detail": status.value}}
        took = self.held_out.get(chunk) if request["has_null"] else self.us[chunk]
        if took is None:
            raise ChildEnded("ended with SIGSEGV", "")
        ours = [10.0 * WOBBLE[i % 4] for i in range(request["blocks"])]
        return {"times": {
            "incumbent": ours, "other": [took * WOBBLE[(i + 1) % 4] for i in range(request["blocks"])],
            "null": [10.0 * WOBBLE[(i + 2) % 4] for i in range(request["blocks"])],
        }}  # fmt: skip

    def close(self) -> None:
        pass


class Tunable:
    """A pack's choices; 32 cannot be built, 1 keeps too little in flight."""

    def refused(self, space: TuningSpace, configuration: Configuration) -> str:
        return "too large" if configuration[0][1] == 32 else ""

    def floor_us(self, space: TuningSpace, configuration: Configuration, moved: int, ceiling: float) -> float:
        return 50.0 if configuration[0][1] == 1 else 1.0

    def build_configurations(self, *_: Any) -> None:
        return

    def built(self, *_: Any) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Search with a child that answers from tables."""

    def judged(check: Check, samples: Any) -> Any:
        return SimpleNamespace(status=Status(samples.detail), summary="as planted")

    monkeypatch.setattr(searching.kernels, "judge", judged)

    def run(
        us: Mapping[int, float | None], held_out: Mapping[int, float], wrong: Sequence[int] = (),
        gb_per_s: float = 10.0,
    ) -> Any:  # fmt: skip
        child = Child(us, held_out, wrong, gb_per_s)
        monkeypatch.setattr(searching, "_Child", lambda _desk, _job: child)
        pack = SimpleNamespace(name="toy", claimed_model="toy", traffic=lambda *_: (20_000, 0))
        stand_ins: Any = (pack, Tunable())
        desk = Desk(*stand_ins, "smoke", tmp_path, tmp_path, lambda _seed: [CHECK], lambda _text: None)
        study = search(desk, SPACE, CELL, "toy", 3, Budget(trials=8))
        return study, child

    return run


def endings(study: TuningStudy) -> dict[int, Ending]:
    return {trial.configuration[0][1]: trial.ending for trial in study.trials}


def test_every_trial_is_kept_with_its_ending_and_only_right_ones_are_timed_in_full(found: Any) -> None:
    study, child = found({2: 8.0, 4: 10.0, 8: 20.0, 16: 5.0}, {2: 8.0}, wrong=[16])
    assert endings(study) == {1: Ending.BELOW_ROOFLINE, 2: Ending.TIMED, 8: Ending.SLOW, 16: Ending.WRONG}
    assert [what for what, chunk in child.asked if chunk == 16] == ["time", "test"]
    assert (study.verdict, study.chosen, study.space_size) == ("improved", (("chunk", 2),), 5)
    assert study.held_out is not None
    assert study.held_out.ratio == pytest.approx(1.25, rel=0.03)


def test_a_winner_that_is_no_faster_on_held_out_repeats_is_demoted(found: Any) -> None:
    study, _ = found({2: 8.0, 4: 10.0, 8: 20.0, 16: 20.0}, {2: 9.95})
    assert (study.verdict, study.best is not None, study.chosen) == ("demoted", True, SPACE.incumbent)


def test_an_incumbent_that_nothing_beats_is_confirmed(found: Any) -> None:
    study, _ = found({2: 20.0, 4: 10.0, 8: 20.0, 16: 20.0}, {})
    assert (study.verdict, study.chosen, study.best) == ("confirmed", SPACE.incumbent, None)


def test_a_configuration_that_crashes_its_process_is_one_trial_among_others(found: Any) -> None:
    study, _ = found({2: None, 4: 10.0, 8: 20.0, 16: 20.0}, {})
    assert endings(study)[2] is Ending.CRASHED
    assert next(t.words for t in study.trials if t.ending is Ending.CRASHED) == "ended with SIGSEGV"


def test_a_time_below_what_the_bytes_take_is_a_fault_and_no_record(found: Any) -> None:
    study, _ = found({2: 1.0, 4: 10.0, 8: 20.0, 16: 20.0}, {2: 1.0})  # 20 kB at 10 GB/s take 2 us
    assert endings(study)[2] is Ending.TOO_FAST
    assert study.chosen == SPACE.incumbent


def test_an_incumbent_at_its_roofline_is_left_alone(found: Any) -> None:
    study, child = found({2: 8.0, 4: 10.0}, {}, gb_per_s=2.0)  # 20 kB at 2 GB/s take 10 us
    assert (study.verdict, study.trials) == ("at_the_roofline", ())
    assert [what for what, _ in child.asked] == ["time", "test"]  # the incumbent alone


def test_held_out_repeats_must_beat_the_noise_floor_and_not_only_one() -> None:
    faster = compared([10.0] * 12, [9.8] * 12, 0.05)
    quiet = compared([10.0] * 12, [10.0] * 12, 0.05)
    noisy = compared([10.0, 10.3] * 6, [10.0, 10.0] * 6, 0.05)
    assert judge_held_out(faster, quiet)[0] == "improved"
    assert judge_held_out(faster, noisy)[0] == "demoted"


def test_a_whole_label_names_a_cell_and_a_part_of_one_does_not() -> None:
    label = "sm_90a.tp8.dcp1.b16.c1024.d3.fp8.verify"
    cell = parse_label(label)
    assert cell is not None
    assert (cell.label(), cell.batch, cell.drafts) == (label, 16, 3)
    assert parse_label("b16.c1024") is None
    with pytest.raises(InputError, match="is no cell"):
        parse_label("sm_90a.tp8.dcp1.b16.c1024.d3.fp9.verify")


def test_a_table_with_two_entries_for_one_shape_cannot_be_built() -> None:
    entry = {
        "kernel": "mix", "op": "mix", "implementation": "cpu", "shape": [["tokens", 2]],
        "configuration": [["chunk", 4]], "cell": CELL.label(), "model": "toy", "verdict": "confirmed",
        "measured_us": 1.0, "gain": 1.0, "trials": 3, "record": "0" * 64,
    }  # fmt: skip
    with pytest.raises(ValueError, match="two entries for one kernel and shape"):
        TunedTable.model_validate({"arch": "cpu", "machine": "toy", "entries": [entry, entry]})
