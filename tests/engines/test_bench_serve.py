"""Whole servers under a load generator: what makes two runs comparable, and what the report says."""

import sys
from pathlib import Path

import pytest

from harness.domain.errors import ServiceError
from harness.engines.bench_serve import ORDER, BenchRun, Load, bench_arms, row_of
from harness.engines.metrics import acceptance_length, counted, parse_metrics
from harness.engines.served import Acceptance, ServedArm, ServerSettings

FAKE = Path(__file__).parents[1] / "fakes" / "model_server.py"
LOAD = Load(concurrency=2, requests_each=4)
SETTINGS = ServerSettings(model="m", served_name="m", optimised=ServedArm(arguments=("--fast",)))


def run(turn: int, us: float, **changed: object) -> BenchRun:
    fields: dict[str, object] = {
        "arm": ORDER[turn], "turn": turn, "load": LOAD, "completed": 8, "failed": 0, "reached": 2,
        "prefix_hits": 0, "tpot_us": tuple(us + place for place in range(8)), "ttft_ms": 1,
        "output_tokens_per_s": 1, "output_tokens": 800,
    }  # fmt: skip
    return BenchRun.model_validate(fields | changed)


def runs(**optimised: object) -> list[BenchRun]:
    return [run(0, 2000), run(1, 1000, **optimised), run(2, 2000)]


def test_a_gain_stands_with_its_interval_noise_and_rates() -> None:
    row = row_of(SETTINGS, LOAD, runs())
    assert (row.status, row.stock_us, row.optimised_us) == ("measured", 2003.5, 1003.5)
    assert row.ratio == pytest.approx(1.9965, abs=1e-4)
    assert row.noise == 0.0
    assert row.decode_tokens_per_s == pytest.approx((998.25, 1993.02), abs=0.01)
    assert row.verify_steps_per_s == row.decode_tokens_per_s
    assert row.acceptance == "none: no drafts"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"reached": 1}, "optimised: 2 at once were asked, the server had 1 at most"),
        ({"failed": 1, "completed": 7}, "optimised: 7 of 8 requests completed, 1 failed"),
        ({"output_tokens": 799}, "optimised: 799 tokens came back, and 800 were asked"),
        ({"prefix_hits": 64}, "the arms found 0 to 64 cached prefix tokens: one ran on a warm cache"),
    ],
)
def test_what_is_not_like_for_like_is_invalid(changed: dict[str, object], words: str) -> None:
    row = row_of(SETTINGS, LOAD, runs(**changed))
    assert (row.status, row.words, row.ratio) == ("INVALID", words, None)


@pytest.mark.parametrize(
    ("length", "label", "words"),
    [
        (3.7, "measured", "3.80 and 3.70 tokens a step, measured, in line with the golden 3.78 for 7 drafts"),
        (2.0, "measured", "3.80 and 2.00 tokens a step, measured, below the golden 3.78 for 7 drafts"),
        (6.0, "synthetic", "3.80 and 6.00 tokens a step, synthetic"),
    ],
)
def test_acceptance_travels_with_its_label_and_measured_ones_meet_the_golden_curve(
    length: float, label: str, words: str
) -> None:
    told = Acceptance.model_validate({"label": label, "drafts": 7, "golden": 3.78})
    settings = SETTINGS.model_copy(update={"acceptance": told})
    found = [run(0, 2000, acceptance=3.8), run(1, 1000, acceptance=length), run(2, 2000, acceptance=3.8)]
    row = row_of(settings, LOAD, found)
    assert row.acceptance == words
    assert row.verify_steps_per_s is not None
    assert row.decode_tokens_per_s is not None
    assert row.verify_steps_per_s[1] == pytest.approx(float(row.decode_tokens_per_s[1]) / length)


def test_long_prompts_are_a_mix_of_prefill_and_decode_and_are_called_so() -> None:
    load = LOAD.model_copy(update={"input_tokens": 512})
    mixed = [one.model_copy(update={"load": load}) for one in runs()]
    assert row_of(SETTINGS, load, mixed).words.startswith("mixed prefill and decode: 2.00x")
    assert row_of(SETTINGS, LOAD, runs()).words.startswith("decode alone: 2.00x")


def test_counters_are_what_was_gained_and_lengths_count_the_kept_token() -> None:
    before = parse_metrics('vllm:spec_decode_num_drafts_total{engine="0"} 10.0\n')
    after = parse_metrics(
        "# HELP x\n"
        'vllm:spec_decode_num_drafts_total{engine="0"} 20.0\n'
        'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 20.0\n'
        'vllm:spec_decode_num_accepted_tokens_total{engine="1"} 7.8\n'
    )
    gained = counted(after, before)
    assert gained == {"draft_steps": 10, "accepted": 28}
    assert acceptance_length(gained) == pytest.approx(3.8)
    assert acceptance_length({"accepted": 3}) is None


def test_requests_that_somebody_left_out_are_missed() -> None:
    kept = tuple(2000.0 + place for place in range(7))
    row = row_of(SETTINGS, LOAD, [run(0, 2000), run(1, 1000, tpot_us=kept), run(2, 2000)])
    assert (row.status, row.words) == ("INVALID", "optimised: times of 7 of 8 requests were kept")


def test_a_load_generator_that_fails_is_told_in_its_own_words(tmp_path: Path) -> None:
    settings = ServerSettings(
        model=str(tmp_path), served_name="fake", program=(sys.executable, str(FAKE)),
        optimised=ServedArm(arguments=("--switch=on",)),
    )  # fmt: skip
    with pytest.raises(ServiceError, match="the load generator ended with 1 against stock"):
        bench_arms(settings, [LOAD], tmp_path / "out", lambda _words: None)
