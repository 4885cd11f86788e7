"""The canary asked in its own words: official formats, features, and the engine behind them."""

import subprocess
import sys
from pathlib import Path

import pytest

from harness.domain.check import Check, StageName, Status
from harness.domain.errors import InputError
from harness.domain.pack import Pack
from harness.domain.policy import Proof
from harness.domain.resources import data_folder
from harness.engines.packs import load_pack
from harness.engines.serving import Ask
from harness.engines.text_codec import WordCodec, load_words
from harness.stages.evals import judge, plan, sample
from harness.stages.evals.aime import find_integer
from harness.stages.evals.data import sources
from harness.stages.evals.features import FEATURES
from harness.stages.evals.fixtures import aime_rows, mrcr_rows
from harness.stages.evals.planning import OFFICIAL
from harness.stages.evals.questions import read_aime, read_mrcr
from tests.fakes.requests import POLICY, plan_request, stage_context

WORDS = data_folder("evals") / "canary" / "words.json"


@pytest.fixture(scope="module")
def codec() -> WordCodec:
    return WordCodec(load_words(WORDS))


@pytest.fixture(scope="module")
def pack() -> Pack:
    return load_pack("k3_decode")


def test_the_word_list_has_the_packs_own_tokens(codec: WordCodec) -> None:
    from k3_decode.canary import vocabulary

    words = codec.words
    assert (words.begin, words.user, words.assistant, words.query, words.end) == (
        vocabulary.BOS, vocabulary.USER, vocabulary.ASSISTANT, vocabulary.QUERY, vocabulary.END,
    )  # fmt: skip
    assert len(words.words) == vocabulary.VOCAB
    for token, word in enumerate(words.words):
        spelled = vocabulary.spell(token)
        if token >= vocabulary.CONTENT:
            assert not word.isascii() or word.startswith("caf"), word
        else:
            assert word == ("" if spelled.startswith("?") else spelled)


def test_generated_rows_in_the_hubs_schema_ask_exactly_the_packs_own_questions(
    pack: Pack, codec: WordCodec
) -> None:
    items = pack.eval_items("mrcr_canary", 4, 3)
    for question, item in zip(read_mrcr(mrcr_rows(items, codec), None, len), items, strict=True):
        assert codec.encode(Ask(item="x", messages=question.messages, max_tokens=1)) == item.prompt
        assert codec.decode(item.target) == question.target
        assert question.target.startswith(question.prefix + " ")
    chains = pack.eval_items("chain_canary", 4, 3)
    for question, item in zip(read_aime(aime_rows(chains, codec)), chains, strict=True):
        assert codec.encode(Ask(item="x", text=question.prompt, max_tokens=1)) == item.prompt
        assert find_integer(codec.decode(item.target)) == int(question.target)


def test_a_word_that_the_model_does_not_know_is_an_error(codec: WordCodec) -> None:
    with pytest.raises(InputError, match="'tapirs' is none of the"):
        codec.encode(Ask(item="x", text="BOS tapirs", max_tokens=1))


def _planned(pack: Pack, *subjects: str) -> tuple[Check, ...]:
    proofs = tuple(
        Proof(stage=p.stage, subjects=subjects, thresholds=(("margin", 0.6),))
        if p.stage is StageName.EVALS
        else p
        for p in POLICY.proofs
    )
    request = plan_request(policy=POLICY.model_copy(update={"proofs": proofs}))
    from dataclasses import replace

    from harness.documents import load_claim

    return plan(replace(request, pack=pack, claim=load_claim(pack.claim_file())))


def test_planning_and_judging_load_no_torch() -> None:
    modules = "harness.stages.evals.planning, harness.stages.evals.judging"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_policy_names_evals_by_subject_or_all_features_that_the_claim_promises(pack: Pack) -> None:
    names = [check.subject for check in _planned(pack, "features", "mrcr_fixture")]
    assert names == ["mrcr_fixture", *FEATURES]
    official = _planned(pack, *OFFICIAL)
    assert [check.id for check in official] == [
        "evals/mrcr_2needle/k3", "evals/mrcr_4needle/k3", "evals/mrcr_8needle/k3",
        "evals/aime25.greedy/k3", "evals/aime25.repeated/k3",
    ]  # fmt: skip
    assert all("server" in str(check.unavailable) for check in official)


def test_the_bands_of_mrcr_go_as_far_as_the_claims_context_and_batches_as_its_buckets(pack: Pack) -> None:
    check = _planned(pack, "mrcr")[0]
    assert check.cell is not None
    assert check.cell.context == 1048576
    assert str(check.parameter("bands")).count(",") == 7
    assert check.parameter("batches") == "1,8,64"


def test_a_plan_says_which_bytes_are_the_data_and_which_words_it_is_generated_in(pack: Pack) -> None:
    official = dict(_planned(pack, "aime25")[0].parameters)
    assert official["files"] == sources()["aime25"].digest()
    assert official["revision"] == "563bb8404243c5f09de6ec262f2db674fe5bce9b"
    generated = dict(_planned(pack, "aime25_fixture")[0].parameters)
    assert generated["words"] == load_words(WORDS).digest()


def test_chance_may_fail_the_evals_of_a_plan_no_more_often_than_the_policy_says(pack: Pack) -> None:
    checks = _planned(pack, "drift", "mrcr_canary", "chain_canary", "temperature_sampling")
    shares = {check.subject: check.number("false_alarm") for check in checks if check.subject != "drift"}
    share = 0.05 / (2 * (1 + 4 / 80) + 0.05)
    assert shares == {
        "mrcr_canary": pytest.approx(share), "chain_canary": pytest.approx(share),
        "temperature_sampling": pytest.approx(0.05 * share),
    }  # fmt: skip
    conduct = 2 * 4 * share / 80
    assert sum(shares.values()) + conduct == pytest.approx(0.05)


def test_mrcr_in_the_hubs_format_is_answered_by_the_canary_and_passes(pack: Pack, tmp_path: Path) -> None:
    (check,) = _planned(pack, "mrcr_fixture")
    asked = dict(check.parameters) | {"questions": 2, "items": 2}
    check = check.model_copy(update={"parameters": tuple(asked.items())})
    outcome = judge(check, sample(check, stage_context(pack, tmp_path)))  # type: ignore[arg-type]  # any pack does
    figures = {figure.name: figure.value for figure in outcome.figures}
    assert (figures["stock_score"], figures["optimised_score"], figures["path_share"]) == (1.0, 1.0, 1.0)
    assert outcome.control is not None
    assert outcome.control.kind == "poison"
    assert outcome.status in (Status.PASS, Status.INCONCLUSIVE)


@pytest.mark.parametrize("name", ["structured_output", "stop_handling"])
def test_a_feature_is_shown_in_both_arms_and_its_control_goes_wrong(
    name: str, pack: Pack, tmp_path: Path
) -> None:
    if name == "structured_output":
        pytest.importorskip("outlines_core", reason="answers under a schema need outlines-core")
    (check,) = _planned(pack, name)
    asked = dict(check.parameters) | {"items": 2}
    check = check.model_copy(update={"parameters": tuple(asked.items())})
    outcome = judge(check, sample(check, stage_context(pack, tmp_path)))  # type: ignore[arg-type]  # any pack does
    assert outcome.status is Status.PASS, outcome.summary
    assert outcome.control is not None
    assert outcome.control.kind == "switch_off"
