"""The observer inside vLLM: what it takes for a vLLM that it knows, and what it writes down."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.engines.observed import StepBook
from harness.engines.observer import plugin, points
from harness.engines.observer_home import observer_environment
from harness.engines.serving import Reply, StepTotal

SOURCES = {
    "v1/worker/worker_base.py": (
        "class WorkerBase:\n    def compile_or_warm_up_model(self): ...\n"
        "class WorkerWrapperBase:\n    def init_device(self): ...\n"
    ),
    "v1/worker/gpu_model_runner.py": (
        "class GPUModelRunner:\n"
        "    def execute_model(self, scheduler_output, intermediate_tensors=None): ...\n"
        "    def _determine_batch_execution_and_padding(self, num_tokens, num_reqs): ...\n"
    ),
    "v1/worker/gpu/model_runner.py": (
        "class GPUModelRunner:\n"
        "    def execute_model(self, scheduler_output, intermediate_tensors=None): ...\n"
    ),
    "v1/worker/gpu/dp_utils.py": "def dispatch_cg_and_sync_dp(cudagraph_manager, num_reqs, num_tokens): ...",
    "v1/worker/gpu/cudagraph_utils.py": (
        "class BatchExecutionDescriptor:\n    cg_mode: int\n    num_tokens: int\n"
    ),
    "v1/core/sched/output.py": (
        "class SchedulerOutput:\n    scheduled_new_reqs: list\n    scheduled_cached_reqs: list\n"
        "    num_scheduled_tokens: dict\n    scheduled_spec_decode_tokens: dict\n"
        "class CachedRequestData:\n    req_ids: list\n    num_output_tokens: list\n"
    ),
}


def sources(folder: Path, **changed: str) -> Path:
    """What the observer reads of vLLM 0.32."""
    for name, text in SOURCES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(changed.get(path.stem, text), encoding="utf-8")
    return folder


def scheduled(
    new: dict[str, int], cached: dict[str, tuple[int, int]], drafts: dict[str, Any] | None = None
) -> Any:
    """A step: prompts by tokens; answering requests by (tokens, output tokens so far)."""
    data = SimpleNamespace(req_ids=list(cached), num_output_tokens=[count for _, count in cached.values()])
    tokens = {**new, **{name: count for name, (count, _) in cached.items()}}
    return SimpleNamespace(
        scheduled_cached_reqs=data, num_scheduled_tokens=tokens, scheduled_spec_decode_tokens=drafts or {}
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_vllm_with_every_point_is_known(tmp_path: Path) -> None:
    assert points.missing_points("0.32.0+cpu", sources(tmp_path)) == ()


def test_a_version_that_nobody_read_is_not_known(tmp_path: Path) -> None:
    assert points.missing_points("0.34.0", sources(tmp_path)) == (
        "vLLM 0.34.0 is not known to this observer; it knows 0.32.x, 0.33.x",
    )


def test_a_method_that_lost_a_parameter_is_named(tmp_path: Path) -> None:
    folder = sources(tmp_path, dp_utils="def dispatch_cg_and_sync_dp(manager, num_reqs, num_tokens): ...\n")
    assert points.missing_points("0.32.0", folder) == (
        "dispatch_cg_and_sync_dp in vllm/v1/worker/gpu/dp_utils.py has no cudagraph_manager",
    )


def test_033_also_needs_the_specialised_decode(tmp_path: Path) -> None:
    missing = points.missing_points("0.33.0", sources(tmp_path))
    assert [words.split(" ")[0] for words in missing] == [
        "vllm/models/kimi_k3/nvidia/specialized_decode/runtime/decode.py",
        "vllm/models/kimi_k3/nvidia/model.py",
    ]


@pytest.mark.skipif(points.vllm_version() is None, reason="vllm is not installed in this environment")
def test_the_installed_vllm_is_known() -> None:
    assert points.missing_points(points.vllm_version(), points.vllm_folder()) == ()


def test_beside_an_unknown_vllm_the_observer_stays_off_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(plugin.VARIABLE, str(tmp_path / "book"))
    monkeypatch.setattr(plugin, "vllm_version", lambda: "0.40.0")
    monkeypatch.setattr(plugin, "vllm_folder", lambda: tmp_path)
    plugin.register()
    (said,) = lines(tmp_path / "book")
    assert (said["is_on"], said["why"].startswith("vLLM 0.40.0 is not known")) == (False, True)
    book = StepBook(tmp_path / "book")
    assert not book.is_observed()
    assert book.facts()[0][1].startswith("off: vLLM 0.40.0 is not known")


def test_nobody_who_asks_means_no_file_and_no_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.VARIABLE, raising=False)
    plugin.register()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("step", "phase"),
    [
        (scheduled({"a": 5}, {}), "prefill"),
        (scheduled({}, {"a": (3, 0)}), "prefill"),
        (scheduled({}, {"a": (1, 4)}), "decode"),
        (scheduled({"b": 5}, {"a": (1, 4)}), "mixed"),
        (scheduled({}, {"a": (8, 4)}, {"a": [1]}), "verify"),
    ],
)
def test_the_phase_is_what_the_scheduler_asks(step: Any, phase: str) -> None:
    assert plugin.phase_of(step) == phase


class Runner:
    """As much of vLLM's runner as the observer touches."""

    def __init__(self) -> None:
        self.mode = "FULL"

    def _determine_batch_execution_and_padding(self, rows: int) -> Any:
        return SimpleNamespace(name=self.mode), SimpleNamespace(num_tokens=rows)

    def execute_model(self, step: Any) -> str:
        self._determine_batch_execution_and_padding(rows=max(2, len(step.num_scheduled_tokens)))
        return "the model's own answer"


def watched(path: Path, **planned: Any) -> Runner:
    """A runner whose specialised decode has planned for some batches."""
    runner = Runner()
    watch = plugin._Watch(
        SimpleNamespace(model_runner=runner, compile_or_warm_up_model=lambda: 0), plugin.Notes(str(path))
    )
    watch.begin()
    watch._has_planner = bool(planned)
    watch._planned = {int(rows.removeprefix("rows_")): said for rows, said in planned.items()}
    return runner


def test_a_step_takes_the_path_that_was_planned_when_its_graph_was_captured(tmp_path: Path) -> None:
    runner = watched(tmp_path / "book", rows_2=("optimised", "taken"))
    assert runner.execute_model(scheduled({"a": 4}, {})) == "the model's own answer"
    runner.execute_model(scheduled({}, {"a": (1, 1)}))
    runner.execute_model(scheduled({}, {"a": (1, 2), "b": (1, 1), "c": (1, 1)}))
    runner.mode = "PIECEWISE"
    runner.execute_model(scheduled({}, {"a": (1, 3)}))
    assert [(s["phase"], s["path"], s["reason"]) for s in lines(tmp_path / "book")] == [
        ("prefill", "stock", "prefill_step"),
        ("decode", "optimised", "taken"),
        ("decode", "stock", "no_full_graph_for_3_rows"),
        ("decode", "stock", "no_full_graph_for_1_rows"),
    ]


def test_without_a_specialised_decode_a_step_says_its_graph(tmp_path: Path) -> None:
    watched(tmp_path / "book").execute_model(scheduled({}, {"a": (1, 1)}))
    assert lines(tmp_path / "book")[0]["reason"] == "graph_full"


def test_a_step_says_its_shortest_context_with_its_own_rows_and_its_drafts(tmp_path: Path) -> None:
    runner = watched(tmp_path / "book")
    told = scheduled({}, {"a": (3, 4), "b": (1, 9)}, {"a": [7, 8]})
    told.scheduled_cached_reqs.num_computed_tokens = [1000, 1001]
    runner.execute_model(told)
    runner.execute_model(scheduled({}, {"a": (1, 5)}))
    assert [(s["context"], s["drafts"]) for s in lines(tmp_path / "book")] == [(1002, 2), (0, 0)]


def book(path: Path, *entries: dict[str, Any]) -> StepBook:
    header = {"kind": "observer", "vllm": "0.33.0", "is_on": True, "why": ""}
    path.write_text("".join(json.dumps(e) + "\n" for e in (header, *entries)), encoding="utf-8")
    return StepBook(path)


def step(number: int, phase: str, ids: list[str], prompts: list[str], path: str = "stock") -> dict[str, Any]:
    return {
        "kind": "step", "step": number, "phase": phase, "requests": len(ids), "tokens": len(ids),
        "path": path, "reason": "r", "ids": ids, "prompts": prompts,
    }  # fmt: skip


def test_selections_name_attention_and_the_experts_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    class FlashMLAImpl: ...

    class Mxfp4MoEMethod:
        def __init__(self) -> None:
            self.mxfp4_backend = SimpleNamespace(name="MARLIN")

    class MultiHeadLatentAttention:
        def __init__(self) -> None:
            self.impl, self.unrelated = FlashMLAImpl(), 3

    class RoutedExperts:
        def __init__(self) -> None:
            self.quant_method = Mxfp4MoEMethod()

    monkeypatch.setattr(plugin, "_all_reduce", lambda: "none: one rank")
    compilation = SimpleNamespace(
        cudagraph_mode=SimpleNamespace(name="FULL"), cudagraph_capture_sizes=[1, 2], mode=0
    )
    config = SimpleNamespace(
        compilation_config=compilation, model_config=SimpleNamespace(dtype="bf16", enforce_eager=False)
    )
    model = SimpleNamespace(modules=lambda: [MultiHeadLatentAttention(), RoutedExperts()])
    found = plugin._selections(SimpleNamespace(vllm_config=config), model, None)
    assert found["attention"] == ["FlashMLAImpl"]
    assert found["backends"] == {
        "MultiHeadLatentAttention.impl": ["FlashMLAImpl"],
        "RoutedExperts.quant_method": ["Mxfp4MoEMethod"],
        "RoutedExperts.quant_method.mxfp4_backend": ["MARLIN"],
    }
    assert (found["graph_mode"], found["graph_sizes"], found["decode"]) == ("FULL", [1, 2], None)


def test_steps_are_added_up_by_kind_and_from_a_mark_on(tmp_path: Path) -> None:
    found = book(tmp_path / "b", step(1, "decode", ["a", "b"], []), step(2, "decode", ["a", "b"], []))
    assert found.totals() == {StepTotal("decode", "stock", "r", 2): 4}
    assert found.totals(since=1) == {StepTotal("decode", "stock", "r", 2): 2}


def test_totals_tell_contexts_by_powers_of_two_and_the_drafts_of_verify_steps_alone(tmp_path: Path) -> None:
    told = {"context": 1500, "drafts": 3}
    found = book(tmp_path / "b", step(1, "verify", ["a"], []) | told, step(2, "decode", ["a"], []) | told)
    assert found.totals() == {
        StepTotal("verify", "stock", "r", 1, 1024, 3): 1, StepTotal("decode", "stock", "r", 1, 1024, 0): 1,
    }  # fmt: skip


def test_a_whole_servers_setting_makes_its_steps_optimised_where_it_was_seen_chosen(tmp_path: Path) -> None:
    selected = {"kind": "selected", "eager": True, "attention": ["FlashMLAImpl"]}
    found = book(tmp_path / "b", selected, step(1, "decode", ["a"], []))
    assert found.totals([("eager", "True"), ("attention", "FlashMLAImpl")]) == {
        StepTotal("decode", "optimised", "selected", 1): 1
    }
    assert found.totals([("eager", "False")]) == {StepTotal("decode", "stock", "not_selected_eager", 1): 1}


def test_each_token_has_the_step_that_made_it(tmp_path: Path) -> None:
    found = book(
        tmp_path / "b",
        step(1, "prefill", ["cmpl-1-0-x"], ["cmpl-1-0-x"]),
        step(2, "mixed", ["cmpl-1-0-x", "cmpl-2-0-y"], ["cmpl-2-0-y"], "optimised"),
        step(3, "decode", ["cmpl-1-0-x", "cmpl-2-0-y"], []),
    )
    reply = Reply(item="i", text="abc", tokens=(1, 2, 3), finish="stop", prompt_tokens=1)
    told = found.with_steps(reply, "cmpl-1")
    assert (told.steps, told.paths) == ((None, 2, 3), ("", "optimised/r", "stock/r"))


def test_a_server_of_ours_finds_the_observer_and_nothing_else_of_ours(tmp_path: Path) -> None:
    variables = observer_environment(
        tmp_path, tmp_path / "steps.jsonl", {"PYTHONPATH": "/theirs", "VLLM_PLUGINS": "a"}
    )
    assert variables["VLLM_PLUGINS"] == "a,fasttrack_observer"
    assert variables["PYTHONPATH"] == f"{tmp_path / 'plugins'}:/theirs"
    assert sorted(p.name for p in (tmp_path / "plugins" / "fasttrack_observer").iterdir()) == [
        "__init__.py", "plugin.py", "points.py",
    ]  # fmt: skip
