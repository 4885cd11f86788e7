"""Commands of a comparison: two arms that differ in the switch, and words for what cannot be had."""

import json

import pytest
from pydantic import ValidationError

from harness.domain.errors import InputError
from harness.engines.served import Acceptance
from harness.recipes import load_models, recipe
from harness.recipes.commands import Recipe, Workload, shell
from harness.recipes.servers import server_settings
from harness.recipes.table import MachineRecipe


def made(gpus: str = "16xGB300", **workload: float) -> Recipe:
    return recipe(load_models(), "kimi-k3", gpus, Workload.model_validate(workload))


def test_the_two_servers_differ_in_the_switch_and_in_nothing_else() -> None:
    found = made(drafts=7)
    assert found.optimised == (
        *found.stock,
        '--additional-config={"decode_backend": "latency_specialized"}',
    )


def test_a_plain_cell_gives_these_commands() -> None:
    found = made("8xB300", batch=4, input_tokens=1, output_tokens=1000)
    assert shell(found.stock) == (
        "vllm serve moonshotai/Kimi-K3 --host=127.0.0.1 --port=8000 --tensor-parallel-size=8"
    )
    assert shell(found.bench) == (
        "vllm bench serve --model=moonshotai/Kimi-K3 --base-url=http://127.0.0.1:8000 --dataset-name=random "
        "--random-input-len=1 --random-output-len=1000 --ignore-eos --num-prompts=40 --max-concurrency=4 "
        "--num-warmups=4 --percentile-metrics=ttft,tpot,itl --metric-percentiles=50,90,99 --save-result"
    )
    assert [e[-2] for e in found.evals] == ["--apply_chat_template"] * 2
    assert all("num_concurrent=4" in e[2] for e in found.evals)


def test_synthetic_acceptance_is_set_in_both_arms_and_labelled() -> None:
    found = made(drafts=7, synthetic_acceptance=6)
    config = json.loads(found.stock[-1].removeprefix("--speculative-config="))
    assert config["num_speculative_tokens"] == 7
    assert (config["rejection_sample_method"], config["synthetic_acceptance_length"]) == ("synthetic", 6)
    assert any("acceptance 6 is synthetic" in note for note in found.notes)


def test_measured_acceptance_names_the_golden_one_of_that_many_drafts() -> None:
    assert any("golden for 7 drafts: 3.78 tokens a step" in note for note in made(drafts=7).notes)


def test_hopper_has_a_stock_server_only_and_says_why() -> None:
    found = made("16xH200")
    assert found.stock
    assert not found.optimised
    assert "vLLM 0.33 refuses latency_specialized outside the SM100 family" in found.notes[0]


def test_a_machine_that_cannot_hold_the_model_gets_no_commands() -> None:
    found = made("8xH200")
    assert (found.stock, found.optimised, found.bench, found.evals) == ((), (), (), ())
    assert found.notes == ("the weights (1.42 TB) do not fit into 8 H200s (1.13 TB)",)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"gpus": "9xH200"}, "no recipe for kimi-k3 on '9xH200'; known: 16xGB300"),
        ({"batch": 65}, r"batch 65 is beyond what kimi-k3's optimised path takes \(64\)"),
        ({"drafts": 8}, "8 drafts: kimi-k3's optimised path takes at most 7"),
        ({"synthetic_acceptance": 2}, "a synthetic acceptance needs --drafts"),
        ({"drafts": 2, "synthetic_acceptance": 4}, "it lies between 1 and 3"),
    ],
)
def test_what_the_table_does_not_have_is_bad_input(arguments: dict[str, float], words: str) -> None:
    with pytest.raises(InputError, match=words):
        made(**arguments)  # type: ignore[arg-type]  # one table for both kinds


def test_an_unknown_model_names_those_that_are_known() -> None:
    with pytest.raises(InputError, match="no recipe for model 'other'; known: kimi-k3"):
        recipe(load_models(), "other", "16xGB300", Workload())


def test_a_machine_without_an_optimised_path_must_say_why() -> None:
    with pytest.raises(ValidationError, match="does not say why"):
        MachineRecipe(gpus="1xA100", arguments=(), source="x", is_specialised=False)


def test_every_line_of_the_table_has_its_source() -> None:
    assert all(m.source for model in load_models() for m in model.machines)


def test_a_recipe_becomes_the_settings_of_two_servers_that_differ_in_the_switch() -> None:
    models = load_models()
    workload = Workload(batch=1, drafts=7)
    found = server_settings(models, recipe(models, "kimi-k3", "16xGB300", workload), workload)
    assert found.optimised.arguments == ('--additional-config={"decode_backend": "latency_specialized"}',)
    assert found.stock.arguments == ()
    names = [word.partition("=")[0] for word in found.common]
    assert names == ["--tensor-parallel-size", "--speculative-config"]
    assert found.acceptance == Acceptance(label="measured", drafts=7, golden=3.78)


def test_a_forced_acceptance_is_labelled_synthetic_and_meets_no_golden_length() -> None:
    models = load_models()
    workload = Workload(batch=1, drafts=7, synthetic_acceptance=6)
    found = server_settings(models, recipe(models, "kimi-k3", "16xGB300", workload), workload)
    assert found.acceptance == Acceptance(label="synthetic", drafts=7)


def test_a_machine_without_an_optimised_arm_has_no_settings() -> None:
    models = load_models()
    with pytest.raises(InputError, match=r"has no optimised arm: vLLM 0\.33 refuses"):
        server_settings(models, recipe(models, "kimi-k3", "16xH200", Workload()), Workload())
