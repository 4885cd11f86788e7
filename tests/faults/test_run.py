"""Scoring planted faults, and suites from elsewhere."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.domain.faults import FaultResult, FaultScore, Sighting
from harness.domain.machine import Gpu, Tier
from harness.faults.bench import Bench
from harness.faults.fault import Fault
from harness.faults.registry import Registered, registered_faults
from harness.faults.run import judge_sightings, plant


class Nothing:
    """A scene that is never looked at."""

    def look(self, bench: Bench, is_repaired: bool) -> tuple[Sighting, ...]:
        raise AssertionError


def registered(expected: str = "kernels", gap: str = "") -> Registered:
    fault = Fault("a_fault", "It is wrong.", "somebody/something#1", "op", expected, Nothing(), gap=gap)  # type: ignore[arg-type]  # text for a literal
    return Registered("own", fault)


def saw(status: str, column: str = "kernels", subject: str = "kernels/a", noisy: bool = False) -> Sighting:
    return Sighting.model_validate(
        {"column": column, "subject": subject, "status": status, "words": status, "is_statistical": noisy}
    )


def test_a_fault_is_caught_where_a_check_objects_to_it_and_passes_its_twin() -> None:
    result = judge_sightings(registered(), [saw("FAIL")], [saw("PASS")])
    assert (result.verdict, result.cells[0].is_caught, result.false_alarms) == ("caught", True, ())


def test_an_objection_that_the_twin_gets_too_catches_nothing_and_is_a_false_alarm() -> None:
    result = judge_sightings(registered(), [saw("FAIL")], [saw("FAIL")])
    assert (result.verdict, [a.status for a in result.false_alarms]) == ("missed", ["FAIL"])


def test_another_stage_than_expected_catches_elsewhere() -> None:
    result = judge_sightings(registered("evals"), [saw("FAIL")], [saw("PASS")])
    assert result.verdict == "caught_elsewhere"


def test_no_evidence_counts_as_an_objection() -> None:
    assert judge_sightings(registered(), [saw("NO_EVIDENCE")], [saw("PASS")]).verdict == "caught"


def test_a_check_that_ran_for_the_fault_alone_decides_nothing() -> None:
    result = judge_sightings(registered(), [saw("FAIL", subject="kernels/b")], [saw("PASS")])
    assert result.verdict == "missed"


def test_too_few_samples_accuse_no_twin() -> None:
    result = judge_sightings(registered("sweep"), [], [saw("INCONCLUSIVE", "sweep", noisy=True)])
    assert result.false_alarms == ()


def score(*results: FaultResult) -> FaultScore:
    return FaultScore.model_validate(
        {
            "harness_version": "1", "harness_digest": "0" * 64, "pack": "p", "pack_digest": "1" * 64,
            "tier": "smoke", "seed": 0, "created": "2026-11-29T00:00:00Z", "cpu_model": "x",
            "results": results,
        }
    )  # fmt: skip


def test_a_miss_that_names_its_gap_is_expected_and_one_that_does_not_is_not() -> None:
    known = judge_sightings(registered(gap="nobody looks there"), [saw("PASS")], [saw("PASS")])
    unknown = judge_sightings(registered(), [saw("PASS")], [saw("PASS")])
    assert score(known).is_as_expected
    assert not score(unknown).is_as_expected


def test_noise_may_accuse_a_twin_and_a_deterministic_check_may_not() -> None:
    noisy = judge_sightings(registered(), [saw("FAIL")], [saw("PASS"), saw("FAIL", "sweep", "sweep/a", True)])
    assert score(noisy).is_as_expected
    exact = judge_sightings(registered(), [saw("FAIL")], [saw("PASS"), saw("FAIL", subject="kernels/b")])
    assert not score(exact).is_as_expected


def test_the_words_count_what_was_planted_caught_skipped_and_falsely_accused() -> None:
    caught = judge_sightings(registered(), [saw("FAIL")], [saw("PASS")])
    missed = judge_sightings(registered(gap="x"), [saw("PASS")], [saw("FAIL")])
    skipped = FaultResult.model_validate(
        caught.model_dump()
        | {"name": "other", "verdict": "skipped", "reason": "needs tier rank", "cells": ()}
    )
    assert score(caught, missed, skipped).words() == (
        "1 of 2 planted faults caught at tier smoke (0 by another stage than expected), 1 skipped for want "
        "of a GPU; repaired twins: 1 false alarms from deterministic checks, 0 from statistical ones"
    )


def test_a_verdict_that_its_cells_do_not_give_cannot_be_built() -> None:
    missed = judge_sightings(registered(), [saw("PASS")], [saw("PASS")])
    with pytest.raises(ValueError, match="the cells say missed"):
        FaultResult.model_validate(missed.model_dump() | {"verdict": "caught"})


def test_a_scene_that_breaks_makes_its_fault_broken_and_says_where(tmp_path: Path) -> None:
    result = plant(registered(), Bench(tmp_path))
    assert result.verdict == "broken"
    assert result.reason.startswith("AssertionError at test_run.py:")


def test_every_fault_has_a_report_and_every_gap_a_reason() -> None:
    own = [r.fault for r in registered_faults() if r.suite == "own"]
    assert len(own) >= 60
    assert [f.name for f in own if len(f.report) < 8 or len(f.title) < 20] == []


STRANGER = """
from contextlib import contextmanager
from harness.faults.fault import Fault
from harness.faults.scenes import PatchScene
from k3_decode.dispatch import Dispatcher

@contextmanager
def plant(is_repaired):
    before = Dispatcher._reason
    if not is_repaired:
        Dispatcher._reason = lambda self, facts: "taken"
    try:
        yield
    finally:
        Dispatcher._reason = before

def suite():
    scene = PatchScene(plant, ("kernels/router/guard/cpu",))
    title = "The guard takes everything."
    yield Fault("strangers_fault", title, "stranger/package#7", "dispatcher", "kernels", scene)
"""


def test_a_strangers_suite_from_outside_the_repository_runs_too(tmp_path: Path) -> None:
    info = tmp_path / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fasttrack.faults]\nstrangers = stranger_faults:suite\n")
    (tmp_path / "stranger_faults.py").write_text(STRANGER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [
        sys.executable, "-c", "from harness.cli.main import entry; entry()",
        "faults", "run", "strangers_fault", "--json",
    ]  # fmt: skip
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    (result,) = json.loads(ended.stdout)["results"]
    assert (result["suite"], result["verdict"]) == ("strangers", "caught")


def test_a_fault_of_the_path_is_looked_for_on_the_architecture_of_the_machine(tmp_path: Path) -> None:
    bench = Bench(tmp_path, tier=Tier.RANK)
    card = Gpu(name="NVIDIA H200", arch="sm_90a", memory_bytes=2**37)
    machine = bench.request.machine.model_copy(update={"gpus": (card,)})
    bench.__dict__["request"] = replace(bench.request, machine=machine)
    (check,) = bench.checks("coverage/path/{arch}.tp1.dcp1.b8.c24.d0.bf16.decode")
    assert check.id == "coverage/path/sm_90a.tp1.dcp1.b8.c24.d0.bf16.decode"
    assert check.parameter("implementation") == "cute"


KINDS = (
    "vllm-project/vllm#41292", "vllm-project/vllm#49918", "vllm-project/vllm#53912",
    "vllm-project/vllm#47930",
    "vllm-project/vllm#54360", "vllm-project/vllm#57716", "vllm-project/vllm#52531",
    "vllm-project/vllm#52383",
    "vllm-project/vllm#40047", "vllm-project/vllm#52205", "vllm-project/vllm#53000", "vllm-project/vllm#8558",
    "NVIDIA/cutlass#3279", "vllm-project/vllm#41623", "ROCm/FlyDSL#590", "ROCm/aiter#2900",
    "vllm-project/vllm#52109", "vllm-project/vllm#51187", "pytorch/pytorch#146554", "vllm-project/vllm#46142",
    "NVIDIA/TensorRT-LLM#16937", "vllm-project/vllm#52884", "karpathy/llm.c#851",
    "flashinfer-ai/flashinfer-bench-starter-kit#21", "flashinfer-ai/flashinfer#2899",
    "flashinfer-ai/flashinfer#3622", "ScalingIntelligence/KernelBench#165", "vllm-project/vllm#56644",
    "google-deepmind/eval_hub#8", "SemiAnalysisAI/InferenceX#1580", "vllm-project/vllm#51798",
)  # fmt: skip
"""The kinds of fault that this project set out from, by one report each."""


def test_every_kind_that_the_project_set_out_from_is_planted() -> None:
    reports = {r.fault.report for r in registered_faults()}
    assert [kind for kind in KINDS if kind not in reports] == []
    assert len(KINDS) == 31
