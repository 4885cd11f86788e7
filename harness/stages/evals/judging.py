"""What the answers of an eval amount to.

Pure: samples in, outcome out; answers are scored here, by the harness's scorers. In order: what cannot be
compared is INVALID; failures that are no wrong answers FAIL on their own; without the optimised path's
tokens, or with a stock arm that cannot do the task, there is NO_EVIDENCE; then the paired scores decide.
"""

from collections.abc import Mapping
from itertools import groupby
from math import comb
from statistics import fmean
from typing import NamedTuple

from harness.domain.check import Check, Control, Figure, Finding, Outcome, Samples, Severity, Status, judged
from harness.domain.record import Scalar
from harness.domain.table_shape import unusable
from harness.measure.clustered import compare_clusters
from harness.measure.paired import Pairs, Verdict, compare_pairs
from harness.stages.evals.aime import lm_eval_score, mark
from harness.stages.evals.conduct import FAILED_CONDUCT, Conduct, Trouble, conduct_of, troubles
from harness.stages.evals.drift import judge_drift
from harness.stages.evals.engine_judging import judge_engine
from harness.stages.evals.feature_judging import judge_feature
from harness.stages.evals.ledger_tables import lacking_cells, steps_to_fill
from harness.stages.evals.scorers import SCORER_IDS, mrcr, score_tokens
from harness.stages.evals.shares import NEXT_STEPS, figure_of, limit, low_share, path_share, rows_of
from harness.stages.evals.tables import answer_faults, task_faults

__all__ = ["judge"]

MAX_FLIPPED_SHOWN = 20
RIGHT = 1.0 - 1e-9
"""Score from which an answer counts as right where scores are yes or no."""
Key = tuple[str, int]


class _Answer(NamedTuple):
    """One answer, scored."""

    item: str
    repeat: int
    context: int
    score: float
    conduct: Conduct
    length: int
    lm_eval: float | None
    """lm-eval's own score by our account of its rule, where the task has one."""


class _Found(NamedTuple):
    """What the scores say."""

    verdict: Verdict
    difference: float
    low: float
    high: float
    power: float
    needed: str
    """How much more would settle it."""
    mcnemar_p: float | None


Arm = Mapping[Key, _Answer]


def judge(check: Check, samples: Samples) -> Outcome:
    """The outcome of one eval."""
    kind = check.parameter("kind")
    if kind == "drift":
        return judge_drift(check, samples)
    if kind == "feature":
        return judge_feature(check, samples)
    if kind == "engine":
        return judge_engine(check, samples)
    return _judge_answers(check, samples)


def _judge_answers(check: Check, samples: Samples) -> Outcome:
    is_text = check.parameter("kind") == "official"
    unfit = (answer_faults if is_text else task_faults)(check, samples)
    if unfit := unfit or _unlike(check, samples):
        return unusable(check, samples, unfit)
    arms = {arm: _scored(check, samples, arm) for arm in ("stock", "optimised", "poison")}
    stock, optimised = arms["stock"], arms["optimised"]
    if not stock:
        return judged(check, samples, Status.NO_EVIDENCE, "no item was answered", NEXT_STEPS, None, ())
    found = _compare(check, stock, optimised)
    share = path_share(samples)
    status, words = _verdict(check, samples, stock, optimised, found.verdict, share)
    next_steps: Mapping[Status, str] = NEXT_STEPS
    if status is Status.PASS and (lacking := lacking_cells(check, samples)) is not None:
        status, words, next_steps = Status.NO_EVIDENCE, lacking, steps_to_fill(check)
    if words == "":
        words = (
            f"{_mean(optimised):.3f} against stock's {_mean(stock):.3f} on {len(stock)} answers; difference "
            f"at least {found.low:+.3f} (margin {check.number('margin')}), {found.needed} settle it"
        )
    control = (
        _poison_control(arms["poison"], stock)
        if arms["poison"]
        else _planted_control(check, stock, optimised)
    )
    figures = (*_figures(check, arms, found, share), *_acceptance_figures(samples))
    return judged(check, samples, status, words, next_steps, control, figures, _flipped(check, samples, arms))


def _verdict(
    check: Check, samples: Samples, stock: Arm, optimised: Arm, verdict: Verdict, share: float | None
) -> tuple[Status, str]:
    """Status and, where it is not about the scores' difference, its words."""
    if trouble := _troubles(check, samples, stock, optimised):
        return Status.FAIL, "; ".join(t.words for t in trouble)
    if (low := low_share(check, share) or _small_batch(check, samples)) is not None:
        return Status.NO_EVIDENCE, low
    least = float(check.parameter("min_score") or 0.0)
    if _mean(stock) < least:
        return Status.NO_EVIDENCE, f"stock itself scores {_mean(stock):.3f}, under {least}"
    by_verdict = {
        Verdict.NOT_WORSE: Status.PASS,
        Verdict.WORSE: Status.FAIL,
        Verdict.OPEN: Status.INCONCLUSIVE,
    }
    return by_verdict[verdict], ""


def _small_batch(check: Check, samples: Samples) -> str | None:
    """Why the optimised arm was not graded at the batch that was asked for; None where it was."""
    table = "answers" if check.parameter("kind") == "official" else "items"
    asked = max(int(r["batch"] or 0) for r in rows_of(samples, table) if r["arm"] == "optimised")
    reached = [
        int(r["requests"] or 0)
        for r in rows_of(samples, "loads")
        if r["arm"] == "optimised" and r["phase"] in ("decode", "verify")
    ]
    if max(reached, default=0) >= asked:
        return None
    return f"{asked} requests were asked at once, and no step held more than {max(reached, default=0)}"


def _unlike(check: Check, samples: Samples) -> tuple[str, ...]:
    """Why the arms, or the scores, cannot be put side by side."""
    table = "answers" if check.parameter("kind") == "official" else "items"
    failed = [
        r["item"] for r in rows_of(samples, table) if r["arm"] == "stock" and r["finish"] in FAILED_CONDUCT
    ]
    found = [f"stock itself failed to answer {len(failed)} items, first {failed[0]}"] if failed else []
    counted = {(r["arm"], r["name"]): int(r["value"] or 0) for r in rows_of(samples, "counters")}
    hits = [counted.get((arm, "prefix_hits"), 0) for arm in ("stock", "optimised")]
    if hits[0] != hits[1]:
        found.append(
            f"stock found {hits[0]} cached prefixes, the optimised arm {hits[1]}: one ran on a warm cache"
        )
    wrong = [
        r["item"]
        for r in rows_of(samples, "answers")
        if r["lm_eval"] is not None and float(r["lm_eval"]) != _lm_eval_rule(check, r)
    ]
    if wrong:
        found.append(f"lm-eval scored {len(wrong)} answers otherwise than its rule here, first {wrong[0]}")
    wanted = str(dict(check.parameters).get("data", ""))
    kinds = {"official": ("hub", "official_files"), "local": ("local",), "generated": ("generated",)}.get(
        wanted
    )
    found += [
        f"the data is {r['kind']}, and the plan asks for {wanted}"
        for r in rows_of(samples, "data")
        if kinds is not None and r["kind"] not in kinds
    ]
    return tuple(found)


def _troubles(check: Check, samples: Samples, stock: Arm, optimised: Arm) -> tuple[Trouble, ...]:
    """Failures that are no wrong answers, and a collapse of acceptance."""
    limits = {
        "false_alarm": limit(check, "false_alarm", check.number("alpha")),
        "length_band": limit(check, "length_band", 2.0),
    }
    lengths = [(stock[key].length, optimised[key].length) for key in stock]
    named = [
        {
            f"{item}" if not repeat else f"{item}, repeat {repeat}": a.conduct
            for (item, repeat), a in arm.items()
        }
        for arm in (stock, optimised)
    ]
    found = [_with_words(samples, t) for t in troubles(named[0], named[1], lengths, limits)]
    counted = {(r["arm"], r["name"]): int(r["value"] or 0) for r in rows_of(samples, "counters")}
    rates = []
    for arm in ("stock", "optimised"):
        drafted, accepted = (counted.get((arm, name), 0) for name in ("drafted", "accepted"))
        rates.append(accepted / drafted if drafted else None)
    if rates[0] is not None and rates[1] is not None:
        least = limit(check, "min_acceptance_ratio", 0.9)
        if rates[1] < least * rates[0]:
            words = f"{rates[1]:.1%} of the drafts were accepted, of stock's {rates[0]:.1%}"
            found.append(Trouble("acceptance", words))
    return tuple(found)


def _with_words(samples: Samples, trouble: Trouble) -> Trouble:
    """Answers that never came, with what their server said at its end."""
    said = [
        str(r["value"])
        for r in rows_of(samples, "settings")
        if r["arm"] == "optimised" and r["name"] == "failure"
    ]
    if not said or trouble.kind != "transport":
        return trouble
    return trouble._replace(words=f"{trouble.words}: {said[0]}")


def _acceptance_figures(samples: Samples) -> list[Figure]:
    """Tokens a verify step of each arm that drafted, with the label that its settings give."""
    counted = {(r["arm"], r["name"]): int(r["value"] or 0) for r in rows_of(samples, "counters")}
    labels = {r["arm"]: str(r["value"]) for r in rows_of(samples, "settings") if r["name"] == "acceptance"}
    return [
        Figure(
            name=f"{arm}_acceptance_length",
            value=1 + counted.get((arm, "accepted"), 0) / counted[arm, "draft_steps"],
            note=f"tokens a verify step, {labels.get(arm, 'unlabelled')}",
        )
        for arm in ("stock", "optimised")
        if counted.get((arm, "draft_steps"))
    ]


def _scored(check: Check, samples: Samples, arm: str) -> Arm:
    """An arm's answers by item and repeat."""
    if check.parameter("kind") == "official":
        rows = [_text_answer(check, r) for r in rows_of(samples, "answers") if r["arm"] == arm]
    else:
        rows = [_token_answer(check, r) for r in rows_of(samples, "items") if r["arm"] == arm]
    return {(a.item, a.repeat): a for a in rows}


def _token_answer(check: Check, row: Mapping[str, Scalar]) -> _Answer:
    answer, target = (tuple(int(t) for t in str(row[key]).split()) for key in ("answer", "target"))
    score = score_tokens(
        str(check.parameter("scorer")), answer, target, int(row["prefix_tokens"] or 0),
        int(check.parameter("tail_tokens") or 0),
    )  # fmt: skip
    conduct = conduct_of(str(row["finish"]), answer)
    return _Answer(str(row["item"]), 0, int(row["context"] or 0), score, conduct, len(answer), None)


def _text_answer(check: Check, row: Mapping[str, Scalar]) -> _Answer:
    text, target, finish = str(row["answer"]), str(row["target"]), str(row["finish"])
    words = text.split()
    conduct = conduct_of(finish, words if len(words) >= 32 else tuple(text))
    if check.parameter("scorer") == "aime":
        found = mark(text, target, is_cut_off=finish == "length")
        score = float(found.kind == "right")
        if conduct == "ended" and found.kind == "no_answer":
            conduct = "no_answer"
        if conduct == "truncated" and found.kind in ("right", "wrong"):
            conduct = "ended"
    else:
        score = mrcr(text, target, str(row["prefix"]))
    item, repeat, context = str(row["item"]), int(row["repeat"] or 0), int(row["context"] or 0)
    length = int(row["tokens"] or 0)
    return _Answer(item, repeat, context, score, conduct, length, _lm_eval_rule(check, row))


def _lm_eval_rule(check: Check, row: Mapping[str, Scalar]) -> float:
    if check.parameter("scorer") == "aime":
        return lm_eval_score(str(row["answer"]), str(row["target"]))
    return mrcr(str(row["answer"]), str(row["target"]), str(row["prefix"]))


def _compare(check: Check, stock: Arm, optimised: Arm) -> _Found:
    """Tango's interval where every item has one answer, right or wrong; else a bootstrap over items."""
    margin, alpha, power = (check.number(name) for name in ("margin", "alpha", "power"))
    alarm = limit(check, "false_alarm", alpha)
    is_binary = check.parameter("scorer") != "mrcr"
    if is_binary and all(repeat == 0 for _, repeat in stock):
        pairs = _pairs(stock, optimised)
        found = compare_pairs(pairs, margin, alpha, power, alarm)
        needed = f"{found.items_needed} items"
        return _Found(
            found.verdict, found.difference, found.low, found.high, found.power, needed, found.mcnemar_p
        )
    keys = sorted(stock)
    clusters = [
        [optimised[key].score - stock[key].score for key in group]
        for _, group in groupby(keys, key=lambda key: key[0])
    ]
    if len(clusters) < 2:
        return _Found(
            Verdict.OPEN, sum(clusters[0]) / len(clusters[0]), -1.0, 1.0, 0.0, "2 or more items", None
        )
    seed = int(check.parameter("seed") or 0)
    both = compare_clusters(clusters, margin, alpha, power, alarm, seed)
    needed = f"{both.clusters_needed} items"
    if both.repeats_needed is not None:
        needed += f" or {both.repeats_needed} repeats"
    p = compare_pairs(_pairs(stock, optimised), margin, alpha, power).mcnemar_p if is_binary else None
    return _Found(both.verdict, both.difference, both.low, both.high, both.power, needed, p)


def _pairs(stock: Arm, optimised: Arm) -> Pairs:
    counts = {(a, b): 0 for a in (True, False) for b in (True, False)}
    for key, answer in stock.items():
        counts[answer.score >= RIGHT, optimised[key].score >= RIGHT] += 1
    return Pairs(counts[True, True], counts[True, False], counts[False, True], counts[False, False])


def _poison_control(poison: Arm, stock: Arm) -> Control:
    right = sum(a.score >= RIGHT for a in poison.values())
    before = sum(stock[key].score >= RIGHT for key in poison if key in stock)
    lost = [key for key, a in poison.items() if key in stock and a.score < stock[key].score]
    return Control(
        kind="poison",
        description="the pack's first op made wrong on the optimised path, on the first items",
        failed=bool(lost),
        observed=f"{right} of {len(poison)} right, {before} with stock",
    )


def _planted_control(check: Check, stock: Arm, optimised: Arm) -> Control:
    """Where no arm can be poisoned: right answers of the optimised arm emptied until the margin is lost."""
    planted = dict(optimised)
    emptied = 0
    for key, answer in sorted(optimised.items()):
        if _mean(stock) - _mean(planted) > check.number("margin"):
            break
        if answer.score > 0:
            planted[key] = answer._replace(score=_score_of_nothing(check))
            emptied += 1
    found = _compare(check, stock, planted)
    return Control(
        kind="planted",
        description=f"{emptied} answers of the optimised arm emptied, so that it loses more than the margin",
        failed=emptied > 0 and found.verdict is not Verdict.NOT_WORSE,
        observed=f"difference {found.difference:+.3f}, at least {found.low:+.3f}: {found.verdict.value}",
    )


def _score_of_nothing(check: Check) -> float:
    """What the task's own scorer gives an empty answer."""
    scorer = str(check.parameter("scorer"))
    if scorer == "aime":
        return float(mark("", "1", is_cut_off=False).kind == "right")
    if scorer == "mrcr" and check.parameter("kind") == "official":
        return mrcr("", "prefix and answer", "prefix")
    return score_tokens(scorer, (), (1, 2), 1, 1)


def _figures(check: Check, arms: Mapping[str, Arm], found: _Found, share: float | None) -> tuple[Figure, ...]:
    stock, optimised = arms["stock"], arms["optimised"]
    scorer = SCORER_IDS[str(check.parameter("scorer"))]
    repeats = 1 + max(repeat for _, repeat in stock)
    figures = [
        Figure(name="stock_score", value=_mean(stock), note=f"scorer {scorer}"),
        Figure(name="optimised_score", value=_mean(optimised), note=f"scorer {scorer}"),
        Figure(name="score_difference", value=found.difference, low=found.low, high=found.high),
        figure_of("mcnemar_p", found.mcnemar_p, "scores are shares, not right or wrong"),
        Figure(name="power_at_margin", value=found.power),
        Figure(name="items", value=len({item for item, _ in stock}), note=f"scorer {scorer}"),
        figure_of("path_share", share, "no token was decoded"),
        Figure(name="repeats", value=repeats),
        Figure(name="false_alarm_share", value=limit(check, "false_alarm", check.number("alpha"))),
    ]
    for name, arm in (("stock", stock), ("optimised", optimised)):
        if repeats > 1:
            figures.append(Figure(name=f"{name}_pass_at_{repeats}", value=_pass_at(arm, repeats)))
        if check.parameter("scorer") == "aime":
            own = fmean(a.lm_eval or 0.0 for a in arm.values())
            figures.append(
                Figure(name=f"{name}_lm_eval_score", value=own, note=f"scorer {SCORER_IDS['lm_eval_aime25']}")
            )
        bad = [a.conduct for a in arm.values() if a.conduct != "ended"]
        kinds = ", ".join(f"{bad.count(kind)} {kind}" for kind in sorted(set(bad)))
        figures.append(Figure(name=f"{name}_not_ended", value=len(bad), note=kinds))
    return tuple(figures)


def _pass_at(arm: Arm, k: int) -> float:
    """Chance that one of k answers to an item is right, over all answers given (Chen et al. 2021,
    2107.03374).
    """
    shares = []
    for _, group in groupby(sorted(arm), key=lambda key: key[0]):
        answers = [arm[key].score >= RIGHT for key in group]
        n, wrong = len(answers), answers.count(False)
        shares.append(1.0 - comb(wrong, k) / comb(n, k) if n >= k else float(any(answers)))
    return fmean(shares)


def _flipped(check: Check, samples: Samples, arms: Mapping[str, Arm]) -> tuple[Finding, ...]:
    """Answers that stock has better, where they part, how near a tie that was, and on which path."""
    flips = {(str(r["item"]), int(r["repeat"] or 0)): r for r in rows_of(samples, "flips")}
    near = limit(check, "near_tie_nats", 0.05)
    findings = []
    for key, answer in arms["stock"].items():
        other = arms["optimised"][key]
        if other.score >= answer.score - 1e-9:
            continue
        at = flips.get(key)
        where = "" if at is None else _parting(at, near)
        name = answer.item if not answer.repeat else f"{answer.item}, repeat {answer.repeat}"
        scores = f"{answer.score:.3f} with stock, {other.score:.3f} here"
        message = f"item {name} (context {answer.context}): {scores}{where}"
        findings.append(Finding(rule="flipped_item", severity=Severity.WARNING, message=message))
    return tuple(findings[:MAX_FLIPPED_SHOWN])


def _parting(row: Mapping[str, Scalar], near: float) -> str:
    """In words: the token, the gap, the step."""
    gap = row["stock_gap"]
    if gap is None:
        tie = "gap not told"
    else:
        tie = f"stock's gap {float(gap):.3g} nats, {'a near tie' if float(gap) <= near else 'no near tie'}"
    step = "in prefill" if row["step"] is None else f"step {row['step']}"
    path = f", {row['path']}" if row["path"] else ""
    return f"; parts at token {row['position']} ({tie}; {step}{path})"


def _mean(arm: Arm) -> float:
    return fmean(a.score for a in arm.values())
