"""Official tasks, from a file of rows to a verdict, with an engine that answers from a script."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.domain.check import Check, Outcome, Samples, StageName, Status
from harness.domain.policy import Proof
from harness.engines.serving import Ask, Reply
from harness.stages.evals import judge, plan, sample, tasks
from harness.stages.evals.asking import Journal, ask_arms, batches
from harness.stages.evals.data import FOLDER_VARIABLE
from harness.stages.evals.tables import ANSWER_SHAPES
from tests.fakes.engine import ScriptedEngine, said
from tests.fakes.pack import FakePack
from tests.fakes.requests import POLICY, plan_request, stage_context
from tests.stages.spoiled_tables import spoiled, with_rows

PROBLEMS = 30


def _check(subject: str, **thresholds: float) -> Check:
    settings = tuple(thresholds.items())
    proofs = tuple(
        Proof(stage=p.stage, subjects=(subject,), thresholds=settings) if p.stage is StageName.EVALS else p
        for p in POLICY.proofs
    )
    (check,) = plan(plan_request(policy=POLICY.model_copy(update={"proofs": proofs})))
    asked = dict(check.parameters) | {"questions": PROBLEMS, "repeats": 2, "batches": "1,8"}
    return check.model_copy(update={"parameters": tuple(asked.items())})


@pytest.fixture
def aime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Check, Samples]]:
    """Samples of AIME rows in a local file under a script."""
    rows = [{"id": str(n), "problem": f"Größe {n}?", "answer": f"{n:03d}"} for n in range(PROBLEMS)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    monkeypatch.setenv(FOLDER_VARIABLE, str(path))

    def take(engine: ScriptedEngine, **thresholds: float) -> tuple[Check, Samples]:
        monkeypatch.setattr(tasks, "open_engine", lambda *_: engine)
        check = _check("aime25_local", **thresholds)
        return check, sample(check, stage_context(FakePack(), tmp_path))

    return take


def _right(_arm: str, ask: Ask) -> Reply:
    """The right integer, padded as the data writes it, so that lm-eval's rule misses those with zeros."""
    return said(ask, f"so it is \\boxed{{{int(ask.item):03d}}}")


def _wrong_where(items: tuple[str, ...], text: str = r"so it is \boxed{998}") -> Callable[[str, Ask], Reply]:
    def script(arm: str, ask: Ask) -> Reply:
        return said(ask, text, gap=0.01) if arm == "optimised" and ask.item in items else _right(arm, ask)

    return script


def _figures(outcome: Outcome) -> dict[str, float | int | None]:
    return {figure.name: figure.value for figure in outcome.figures}


def test_equal_arms_pass_and_the_planted_loss_is_noticed(aime: Callable[..., tuple[Check, Samples]]) -> None:
    outcome = judge(*aime(ScriptedEngine(_right), margin=0.1))
    assert outcome.status is Status.PASS
    assert outcome.control is not None
    assert (outcome.control.kind, outcome.control.failed) == ("planted", True)
    figures = _figures(outcome)
    assert (figures["stock_score"], figures["optimised_score"], figures["repeats"]) == (1.0, 1.0, 2)
    assert figures["optimised_pass_at_2"] == 1.0


def test_lm_evals_own_score_stands_beside_ours_under_its_own_id(
    aime: Callable[..., tuple[Check, Samples]],
) -> None:
    outcome = judge(*aime(ScriptedEngine(_right), margin=0.1))
    own = next(f for f in outcome.figures if f.name == "stock_lm_eval_score")
    assert own.value == 0.0  # every answer has a leading zero
    assert own.note == "scorer lm-eval-aime25/0.4.13"


def test_lm_eval_itself_scored_every_answer(aime: Callable[..., tuple[Check, Samples]]) -> None:
    pytest.importorskip("lm_eval", reason="the evals extra is not installed")
    _, samples = aime(ScriptedEngine(lambda _arm, ask: said(ask, str(int(ask.item)))))
    table = samples.table("answers")
    assert table is not None
    assert {row["lm_eval"] for row in table.records()} == {1.0}


def test_a_loss_beyond_the_margin_fails_and_names_token_gap_and_step(
    aime: Callable[..., tuple[Check, Samples]],
) -> None:
    lost = tuple(str(n) for n in range(10, 22))
    outcome = judge(*aime(ScriptedEngine(_wrong_where(lost)), margin=0.1))
    assert outcome.status is Status.FAIL
    message = outcome.findings[0].message
    assert message.startswith("item 10 (context 0): 1.000 with stock, 0.000 here; parts at token 16 (")
    assert "step 17" in message
    assert "optimised/taken" in message


def test_one_flip_among_thirty_problems_is_inconclusive_and_says_how_many_would_settle_it(
    aime: Callable[..., tuple[Check, Samples]],
) -> None:
    outcome = judge(*aime(ScriptedEngine(_wrong_where(("3",)))))
    assert outcome.status is Status.INCONCLUSIVE
    assert "settle it" in outcome.summary


@pytest.mark.parametrize(
    ("finish", "words"),
    [("error", "had no finite log-probability"), ("refusal", "were refused"), ("transport", "never came")],
)
def test_a_failed_request_fails_by_itself_and_is_no_wrong_answer(
    finish: str, words: str, aime: Callable[..., tuple[Check, Samples]]
) -> None:
    def script(arm: str, ask: Ask) -> Reply:
        failed = arm == "optimised" and (ask.item, ask.repeat) == ("4", 1)
        return said(ask, "", finish) if failed else _right(arm, ask)  # type: ignore[arg-type]  # one of three

    outcome = judge(*aime(ScriptedEngine(script), margin=0.5))
    assert outcome.status is Status.FAIL
    assert f"1 answers {words}, first 4, repeat 1" in outcome.summary


def test_a_request_that_failed_with_stock_leaves_nothing_to_compare(
    aime: Callable[..., tuple[Check, Samples]],
) -> None:
    def script(arm: str, ask: Ask) -> Reply:
        return said(ask, "", "transport") if arm == "stock" and ask.item == "4" else _right(arm, ask)

    outcome = judge(*aime(ScriptedEngine(script), margin=0.5))
    assert outcome.status is Status.INVALID
    assert "stock itself failed to answer 2 items" in outcome.summary


@pytest.mark.parametrize(
    ("text", "finish", "words"),
    [
        ("thinking about it", "length", "were cut off"),
        ("I do not know", "stop", "held no answer"),
        ("a" * 200, "stop", "ended in a run of one token"),
        ("to be or not " * 40, "stop", "ended in a loop"),
    ],
)
def test_answers_that_went_astray_fail_by_their_kind(
    text: str, finish: str, words: str, aime: Callable[..., tuple[Check, Samples]]
) -> None:
    def script(arm: str, ask: Ask) -> Reply:
        is_astray = arm == "optimised" and int(ask.item) < 8
        return said(ask, text, finish) if is_astray else _right(arm, ask)  # type: ignore[arg-type]  # one of two

    outcome = judge(*aime(ScriptedEngine(script), margin=0.9))
    assert outcome.status is Status.FAIL
    assert f"16 answers {words}" in outcome.summary


def test_answers_much_longer_than_stocks_fail_though_they_are_right(
    aime: Callable[..., tuple[Check, Samples]],
) -> None:
    def script(arm: str, ask: Ask) -> Reply:
        reply = _right(arm, ask)
        return (
            said(ask, "let me see, " + "".join(map(str, range(40))) + reply.text)
            if arm == "optimised"
            else reply
        )

    outcome = judge(*aime(ScriptedEngine(script), margin=0.5))
    assert outcome.status is Status.FAIL
    assert "times as long as stock's" in outcome.summary


def test_a_collapse_of_acceptance_fails_though_answers_are_right(
    aime: Callable[..., tuple[Check, Samples]],
) -> None:
    engine = ScriptedEngine(_right)
    engine.counted = {
        "stock": {"drafted": 100, "accepted": 60},
        "optimised": {"drafted": 100, "accepted": 25},
    }
    outcome = judge(*aime(engine, margin=0.5))
    assert outcome.status is Status.FAIL
    assert "25.0% of the drafts were accepted, of stock's 60.0%" in outcome.summary


def test_a_cache_that_was_warm_for_one_arm_makes_the_comparison_invalid(
    aime: Callable[..., tuple[Check, Samples]],
) -> None:
    engine = ScriptedEngine(_right)
    engine.counted = {"optimised": {"prefix_queries": 9, "prefix_hits": 7}}
    outcome = judge(*aime(engine, margin=0.5))
    assert outcome.status is Status.INVALID
    assert "one ran on a warm cache" in outcome.summary


def test_right_answers_on_the_stock_path_are_no_evidence(aime: Callable[..., tuple[Check, Samples]]) -> None:
    engine = ScriptedEngine(_right)
    engine.path = "stock"
    assert judge(*aime(engine, margin=0.5)).status is Status.NO_EVIDENCE


def test_a_batch_that_was_asked_for_and_never_reached_is_no_evidence(
    aime: Callable[..., tuple[Check, Samples]],
) -> None:
    check, samples = aime(ScriptedEngine(_right), margin=0.5)
    for name in ("loads", "cells"):
        table = samples.table(name)
        assert table is not None
        place = table.columns.index("requests")
        rows = tuple((*r[:place], 4 if r[place] == 8 else r[place], *r[place + 1 :]) for r in table.rows)
        samples = with_rows(samples, name, rows)
    outcome = judge(check, samples)
    assert outcome.status is Status.NO_EVIDENCE
    assert outcome.summary == "8 requests were asked at once, and no step held more than 5"


def test_a_model_that_cannot_do_the_task_is_no_evidence(aime: Callable[..., tuple[Check, Samples]]) -> None:
    outcome = judge(*aime(ScriptedEngine(lambda _arm, ask: said(ask, r"\boxed{999}")), margin=0.5))
    assert outcome.status is Status.NO_EVIDENCE
    assert "stock itself scores 0.000" in outcome.summary


def test_a_score_that_lm_eval_would_not_give_makes_the_samples_invalid(
    aime: Callable[..., tuple[Check, Samples]],
) -> None:
    check, samples = aime(ScriptedEngine(_right), margin=0.5)
    table = samples.table("answers")
    assert table is not None
    place = table.columns.index("lm_eval")
    rows = tuple((*row[:place], 1.0, *row[place + 1 :]) for row in table.rows)
    outcome = judge(check, with_rows(samples, "answers", rows))
    assert outcome.status is Status.INVALID
    assert "lm-eval scored 120 answers otherwise" in outcome.summary


def test_answers_that_do_not_fit_are_invalid_and_never_a_crash(
    aime: Callable[..., tuple[Check, Samples]],
) -> None:
    check, samples = aime(ScriptedEngine(_wrong_where(("3",))), margin=0.5)
    for done, bad in spoiled(samples, ANSWER_SHAPES):
        assert judge(check, bad).status is Status.INVALID, done


def test_arms_that_did_not_take_turns_are_invalid(aime: Callable[..., tuple[Check, Samples]]) -> None:
    engine = ScriptedEngine(_right)
    engine.is_concurrent = False
    outcome = judge(*aime(engine, margin=0.5))
    assert outcome.status is Status.INVALID
    assert "the arms did not take turns" in outcome.summary


def _asks(count: int) -> list[Ask]:
    return [Ask(item=str(n), text="?", max_tokens=4) for n in range(count)]


def test_batches_take_their_sizes_by_turns() -> None:
    assert [len(group) for group in batches(_asks(14), [1, 8])] == [1, 8, 1, 4]


def test_the_first_arm_of_a_batch_is_the_second_of_the_next(tmp_path: Path) -> None:
    engine = ScriptedEngine(_right)
    groups = list(batches(_asks(3), [1]))
    ask_arms(engine, groups, ("stock", "optimised"), Journal(tmp_path / "j"), lambda _: None)
    assert [arm for arm, _ in engine.seen] == [
        "stock",
        "optimised",
        "optimised",
        "stock",
        "stock",
        "optimised",
    ]


def test_an_engine_of_one_arm_at_a_time_opens_each_once(tmp_path: Path) -> None:
    engine = ScriptedEngine(_right)
    engine.is_concurrent = False
    ask_arms(engine, [_asks(1), _asks(2)], ("stock", "optimised"), Journal(tmp_path / "j"), lambda _: None)
    assert engine.opened == ["stock", "optimised"]


def test_an_interrupted_run_asks_on_from_the_first_batch_that_is_missing(tmp_path: Path) -> None:
    groups = list(batches(_asks(6), [2]))

    def stops(arm: str, ask: Ask) -> Reply:
        if (arm, ask.item) == ("optimised", "4"):
            raise KeyboardInterrupt
        return _right(arm, ask)

    first = ScriptedEngine(stops)
    with pytest.raises(KeyboardInterrupt):
        ask_arms(first, groups, ("stock", "optimised"), Journal(tmp_path / "j"), lambda _: None)
    with (tmp_path / "j").open("a") as file:
        file.write('{"key": "torn')
    second = ScriptedEngine(_right)
    found = ask_arms(second, groups, ("stock", "optimised"), Journal(tmp_path / "j"), lambda _: None)
    assert second.seen == [("optimised", (("4", 0), ("5", 0)))]
    assert len(found.replies("stock")) == len(found.replies("optimised")) == 6
    assert sum(found.steps().values()) == 2 * sum(len(_right("", ask).tokens) for ask in _asks(6))


def test_servers_started_one_after_the_other_are_compared_where_the_plan_says_so(
    aime: Callable[..., tuple[Check, Samples]],
) -> None:
    engine = ScriptedEngine(_right)
    engine.is_concurrent = False
    check, samples = aime(engine, margin=0.1)
    asked = dict(check.parameters) | {"is_interleaved": False}
    outcome = judge(check.model_copy(update={"parameters": tuple(asked.items())}), samples)
    assert outcome.status is Status.PASS
    settings = samples.table("settings")
    assert settings is not None
    assert settings.rows == (
        ("stock", "command", "serve --arm stock"), ("optimised", "command", "serve --arm optimised"),
    )  # fmt: skip
