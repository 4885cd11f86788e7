"""A trace against both arms: what makes two replays unlike, and what is said of like ones."""

from pathlib import Path

import pytest

from harness.domain.resources import data_folder
from harness.engines.bench_serve import ORDER
from harness.engines.replay_arms import ReplayReport, ReplayRun, judged_replay, vocabulary_of
from harness.engines.replaying import ReplayedRequest, interactivity


def _requests(tpot_us: float, **changed: object) -> tuple[ReplayedRequest, ...]:
    known = {"prompt_tokens": 100, "output_tokens": 11, "ttft_ms": 5}
    rows = [
        ReplayedRequest.model_validate(
            {
                **known,
                "id": f"r{n}",
                "user": f"u{n % 4}",
                "tpot_us": tpot_us + n,
                "latency_ms": (tpot_us + n) / 100,
            }
        )
        for n in range(8)
    ]
    return (rows[0].model_copy(update=changed), *rows[1:])


def _runs(hits: int = 400, **changed: object) -> list[ReplayRun]:
    found = []
    for turn, arm in enumerate(ORDER):
        is_optimised = arm == "optimised"
        requests = _requests(1000.0 if is_optimised else 2000.0, **(changed if is_optimised else {}))
        told = {
            "arm": arm, "turn": turn, "requests": requests, "reached": 4, "got": interactivity(requests),
            "prefix_hits": hits if is_optimised else 400,
        }  # fmt: skip
        found.append(ReplayRun.model_validate(told))
    return found


def test_like_replays_give_a_ratio_of_whole_answers_with_its_noise_and_what_users_got() -> None:
    report = judged_replay("--fast", (), _runs())
    assert (report.status, report.noise) == ("measured", 0.0)
    assert report.ratio == pytest.approx(2003.5 / 1003.5)
    assert [run.got and round(float(run.got.p50)) for run in report.runs] == [499, 996, 499]


@pytest.mark.parametrize(
    ("hits", "changed", "words"),
    [
        (400, {"failure": "timed out"}, "optimised: 1 of 8 requests failed, first r0: timed out"),
        (400, {"output_tokens": 10}, "the arms were not asked the same"),
        (441, {}, "the arms found 400 to 441 of 800 prompt tokens in their caches"),
    ],
)
def test_unlike_replays_are_invalid(hits: int, changed: dict[str, object], words: str) -> None:
    report = judged_replay("--fast", (), _runs(hits, **changed))
    assert (report.status, report.words, report.ratio) == ("INVALID", words, None)


def test_a_model_that_cannot_be_read_is_asked_tokens_that_every_model_has() -> None:
    assert vocabulary_of("/no/such/model") == 32000


@pytest.mark.parametrize(
    "path", sorted(data_folder("bundles").glob("served/*replay.json")), ids=lambda p: p.stem
)
def test_a_committed_replay_is_judged_alike_today(path: Path) -> None:
    kept = ReplayReport.model_validate_json(path.read_text())
    again = judged_replay(kept.switch, kept.settings, kept.runs)
    assert (again.status, again.words) == (kept.status, kept.words)
