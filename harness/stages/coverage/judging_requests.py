"""Outcomes of checks on a request's life: verify steps, prefix hits, used slots and features. Pure."""

from harness.domain.check import Check, Control, Figure, Outcome, Samples, Status, judged
from harness.stages.coverage.next_steps import next_steps
from harness.stages.coverage.witnesses import (
    KL_FLOOR,
    Witness,
    figure,
    has_pair,
    median_kl,
    records,
    show,
    witness,
    worst_kl,
)

__all__ = ["judge_feature", "judge_prefix", "judge_reuse", "judge_verify"]


def judge_verify(check: Check, samples: Samples) -> Outcome:
    """Rows kept of verify steps are as near the oracle as decoding one by one."""
    stock, on, planted = (median_kl(samples, pair) for pair in ("stock", "on", "planted"))
    limit = max(KL_FLOOR, check.number("verify_kl_margin") * (stock or 0.0))
    control = _control(
        "planted", "a row fewer kept than was said", samples, planted, limit, "median KL to the oracle"
    )
    figures = (
        figure("verify_kl", on, "log-probabilities are not finite"),
        figure("decode_kl", stock, "log-probabilities are not finite"),
    )
    ran = witness(samples, "on", 1.0)
    status: Status
    if ran.status is not Status.PASS:
        status, words = ran.status, ran.words
    elif stock is None or on is None or on > limit:
        status = Status.FAIL
        words = f"kept rows are {show(on)} from the oracle, decoding one by one {show(stock)} (median KL)"
    else:
        status = Status.PASS
        words = f"median KL to the oracle {show(on)} in verify steps, {show(stock)} decoding one by one"
    return judged(check, samples, status, words, next_steps(check), control, (*figures, _tokens(ran)))


def judge_prefix(check: Check, samples: Samples) -> Outcome:
    """A prompt that finds its prefix answers as it does cold, and the cache's counters say that it did."""
    worst, planted = worst_kl(samples, "on"), median_kl(samples, "planted")
    limit = check.number("resumed_kl")
    control = _control(
        "planted", "the same prompt behind another prefix", samples, planted, limit, "median KL"
    )
    hits = {
        str(row["arm"]): (int(row["hits"] or 0), int(row["reused"] or 0))
        for row in records(samples, "prefixes")
    }
    found, reused = hits.get("on", (0, 0))
    figures = (
        Figure(name="prefix_hits", value=found),
        Figure(name="reused_tokens", value=reused),
        figure("worst_kl_to_cold", worst, "log-probabilities are not finite"),
    )
    ran = witness(samples, "on", 1.0)
    status: Status
    if ran.status is not Status.PASS:
        status, words = ran.status, ran.words
    elif found == 0:
        status = Status.NO_EVIDENCE
        words = "the prefix cache never hit: the second prompt shares its first page with the one before"
    elif hits.get("cold", (1, 0))[0]:
        status, words = Status.INVALID, "the cold session's prompt found a prefix, so nothing was cold"
    elif worst is None or worst > limit:
        status = Status.FAIL
        words = (
            f"behind a prefix hit the answer is {show(worst)} from the cold one (worst KL, limit {limit:g})"
        )
    else:
        status = Status.PASS
        words = f"{found} hit, {reused} tokens reused, worst KL {show(worst)} to the cold run"
    return judged(check, samples, status, words, next_steps(check), control, (*figures, _tokens(ran)))


def judge_reuse(check: Check, samples: Samples) -> Outcome:
    """A slot that another request left answers as a fresh one."""
    worst, planted = worst_kl(samples, "on"), median_kl(samples, "planted")
    limit = check.number("resumed_kl")
    control = _control("planted", "the former owner's answer", samples, planted, limit, "median KL")
    ran = witness(samples, "on", 1.0)
    figures = (figure("worst_kl_to_fresh", worst, "log-probabilities are not finite"), _tokens(ran))
    status: Status
    if ran.status is not Status.PASS:
        status, words = ran.status, ran.words
    elif worst is None or worst > limit:
        status = Status.FAIL
        words = (
            f"in a slot used before the answer is {show(worst)} from a fresh one (worst KL, limit {limit:g})"
        )
    else:
        status, words = Status.PASS, f"worst KL {show(worst)} to a fresh session"
    return judged(check, samples, status, words, next_steps(check), control, figures)


def judge_feature(check: Check, samples: Samples) -> Outcome:
    """A feature's tokens come from the optimised path, are allowed ones, and stock agrees about them."""
    on, planted = median_kl(samples, "on"), median_kl(samples, "planted")
    limit = max(KL_FLOOR, check.number("clean_kl_margin") * (on or 0.0))
    control = _control("poison", "an optimised op made wrong", samples, planted, limit, "median KL")
    ran = witness(samples, "on", check.number("min_path_share"), int(check.number("min_tokens")))
    choices = records(samples, "choices")
    forbidden = [row for row in choices if not row["is_allowed"]]
    figures = (figure("kl_to_stock", on, "log-probabilities are not finite"), _tokens(ran))
    status: Status
    if ran.status is not Status.PASS:
        status, words = ran.status, ran.words
    elif not choices:
        status, words = Status.NO_EVIDENCE, "no token was chosen"
    elif forbidden:
        row = forbidden[0]
        status = Status.FAIL
        words = (
            f"request {row['request']} got token {row['token']} in step {row['step']}, which is not allowed"
        )
    elif on is None:
        status, words = Status.FAIL, "the optimised path gave log-probabilities that are not finite"
    else:
        status = Status.PASS
        words = f"{len(choices)} tokens with {check.subject}, median KL to stock along them {show(on)}"
    return judged(check, samples, status, words, next_steps(check), control, figures)


def _control(
    kind: str, description: str, samples: Samples, planted: float | None, limit: float, measure: str
) -> Control:
    is_seen = has_pair(samples, "planted") and (planted is None or planted > limit)
    return Control.model_validate(
        {
            "kind": kind, "description": description, "failed": is_seen,
            "observed": f"{measure} {show(planted)} (limit {limit:.3g})",
        }
    )  # fmt: skip


def _tokens(ran: Witness) -> Figure:
    return Figure(name="optimised_tokens", value=ran.tokens)
