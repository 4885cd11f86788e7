"""Entry point `vllm.general_plugins`: writes vLLM's own decisions to the file in `FASTTRACK_OBSERVER`.

Lines of JSON: `observer` (version, and why it stays off), `selected` (backends, graph mode and sizes,
sampler), `plan` (what a specialised decode said to a batch while its graph was captured), `step` (phase,
requests, tokens, graph, path and reason of every step). Nothing of vLLM is replaced but attributes of its own
worker and runner objects, by functions that call the original and pass its answer on.
"""

import contextlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from .points import missing_points, vllm_folder, vllm_version

__all__ = ["VARIABLE", "Notes", "phase_of", "prompts_of", "register"]

VARIABLE = "FASTTRACK_OBSERVER"
_MARK = "_fasttrack_observed"
SAMPLERS = ("sampler", "rejection_sampler")


def register() -> None:
    """Hooks the worker of this process, where somebody wants to know; safe to call again."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    notes = Notes(path)
    found = vllm_version()
    missing = missing_points(found, vllm_folder())
    if missing:
        notes.say("observer", vllm=found, is_on=False, why="; ".join(missing))
        return
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    wrapper: Any = WorkerWrapperBase
    stock = wrapper.init_device
    if hasattr(stock, _MARK):
        return

    def init_device(self: Any) -> Any:
        answer = stock(self)
        worker = self.worker
        if getattr(worker, "rank", 0) == 0:
            notes.say("observer", vllm=found, is_on=True, why="")
            _Watch(worker, notes).begin()
        return answer

    setattr(init_device, _MARK, True)
    wrapper.init_device = init_device


class Notes:
    """Appends lines to a file, each whole. A file that cannot be written is never vLLM's trouble."""

    def __init__(self, path: str) -> None:
        self._path, self._lock = path, threading.Lock()

    def say(self, kind: str, **facts: object) -> None:
        """One line."""
        line = json.dumps({"kind": kind, **facts}, default=str) + "\n"
        with self._lock, contextlib.suppress(OSError), open(self._path, "a", encoding="utf-8") as file:
            file.write(line)


class _Watch:
    """One worker's decisions."""

    def __init__(self, worker: Any, notes: Notes) -> None:
        self._worker, self._runner, self._notes = worker, worker.model_runner, notes
        self._planned: dict[int, tuple[str, str]] = {}
        self._has_planner = False
        self._graph, self._rows = "NONE", 0
        self._step = 0

    def begin(self) -> None:
        """Sets the hooks."""
        self._follow_graphs()
        self._wrap(self._worker, "compile_or_warm_up_model", self._warm_up)
        self._wrap(self._runner, "execute_model", self._execute)

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def call(*given: Any, **named: Any) -> Any:
            return around(original, *given, **named)

        setattr(owner, name, call)

    def _follow_graphs(self) -> None:
        """Notes what the graph dispatch answers: a method of one runner, a function of the other's module."""
        runner = self._runner
        if hasattr(runner, "_determine_batch_execution_and_padding"):

            def dispatched(original: Any, *given: Any, **named: Any) -> Any:
                answer = original(*given, **named)
                self._graph, self._rows = _name(answer[0]), int(answer[1].num_tokens)
                return answer

            self._wrap(runner, "_determine_batch_execution_and_padding", dispatched)
            return
        for owner in type(runner).__mro__:
            module = sys.modules.get(owner.__module__)
            original = getattr(module, "dispatch_cg_and_sync_dp", None)
            if module is not None and original is not None and not hasattr(original, _MARK):

                def told(*given: Any, _original: Any = original, **named: Any) -> Any:
                    answer = _original(*given, **named)
                    self._graph, self._rows = _name(answer[0].cg_mode), int(answer[0].num_tokens)
                    return answer

                setattr(told, _MARK, True)
                module.dispatch_cg_and_sync_dp = told  # type: ignore[attr-defined]

    def _warm_up(self, original: Any, *given: Any, **named: Any) -> Any:
        """Model and caches are there, graphs are about to be captured."""
        model = _language_model(self._runner)
        decode = getattr(model, "specialized_decode", None)
        if decode is not None and hasattr(decode, "plan"):
            self._has_planner = True
            self._wrap(decode, "plan", lambda plan, *a, **n: self._plan(decode, plan, *a, **n))
        answer = original(*given, **named)
        self._notes.say("selected", **_selections(self._runner, model, decode))
        return answer

    def _plan(self, decode: Any, original: Any, *given: Any, **named: Any) -> Any:
        answer = original(*given, **named)
        positions = given[0] if given else named["positions"]
        rows = int(positions.shape[0])
        reason = "taken" if answer is not None else _decline(decode, rows, given[1:], named)
        if reason != "outside_capture":
            self._planned[rows] = ("optimised" if answer is not None else "stock", reason)
            self._notes.say("plan", rows=rows, is_taken=answer is not None, reason=reason)
        return answer

    def _execute(self, original: Any, *given: Any, **named: Any) -> Any:
        scheduled = given[0] if given else named.get("scheduler_output")
        self._graph, self._rows = "NONE", 0
        answer = original(*given, **named)
        if scheduled is not None and scheduled.num_scheduled_tokens and not named.get("dummy_run"):
            self._say_step(scheduled)
        return answer

    def _say_step(self, scheduled: Any) -> None:
        tokens: Mapping[str, int] = scheduled.num_scheduled_tokens
        phase = phase_of(scheduled)
        path, reason = "stock", f"graph_{self._graph.lower()}"
        if self._has_planner:
            path, reason = "stock", f"{phase}_step"
            if phase in ("decode", "verify"):
                planned = self._planned.get(self._rows) if self._graph == "FULL" else None
                path, reason = planned or ("stock", f"no_full_graph_for_{sum(tokens.values())}_rows")
        self._step += 1
        self._notes.say(
            "step", step=self._step, phase=phase, requests=len(tokens), tokens=sum(tokens.values()),
            graph=self._graph, rows=self._rows, path=path, reason=reason, ids=list(tokens),
            prompts=sorted(prompts_of(scheduled)), context=shortest_context(scheduled),
            drafts=max((len(ids) for ids in scheduled.scheduled_spec_decode_tokens.values()), default=0),
        )  # fmt: skip


def prompts_of(scheduled: Any) -> set[str]:
    """Requests of a step that still read their prompt."""
    cached = scheduled.scheduled_cached_reqs
    counts = zip(cached.req_ids, cached.num_output_tokens, strict=False)
    return set(scheduled.num_scheduled_tokens) - {name for name, count in counts if count > 0}


def shortest_context(scheduled: Any) -> int:
    """Least context of the requests that decode in a step, its own rows included; 0 where nobody tells."""
    cached = scheduled.scheduled_cached_reqs
    done = getattr(cached, "num_computed_tokens", ())
    counts = zip(cached.req_ids, done, strict=False)
    return min((int(n) + scheduled.num_scheduled_tokens.get(name, 0) for name, n in counts), default=0)


def phase_of(scheduled: Any) -> str:
    """`prefill`, `decode`, `verify` or `mixed`, from what the scheduler asks of the step."""
    prompts = prompts_of(scheduled)
    if len(prompts) == len(scheduled.num_scheduled_tokens):
        return "prefill"
    if prompts:
        return "mixed"
    return "verify" if scheduled.scheduled_spec_decode_tokens else "decode"


def _decline(decode: Any, rows: int, given: tuple[Any, ...], named: Mapping[str, Any]) -> str:
    """Why a specialised decode gave no step, by the conditions that its own docstring lists."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    stage_input = given[0] if given else named.get("intermediate_tensors")
    torch: Any = sys.modules["torch"]  # vLLM has loaded it
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return "outside_capture"
    if stage_input is not None:
        return "pipeline_stage"
    if rows not in getattr(decode, "batches", (rows,)):
        return "rows_not_prepared"
    if not is_forward_context_available():
        return "no_context"
    if _name(get_forward_context().cudagraph_runtime_mode) == "PIECEWISE":
        return "piecewise_graph"
    return "rows_that_are_no_plain_decode_or_uniform_verify"


def _selections(runner: Any, model: Any, decode: Any) -> dict[str, object]:
    """Backends by kind, graph mode and sizes, sampler, KDA decode backend, specialised decode."""
    config = runner.vllm_config
    compilation, found = config.compilation_config, dict[str, set[str]]()
    for module in model.modules() if model is not None else ():
        for key, value in vars(module).items():
            if value is not None and (
                key.endswith("backend") or key in ("impl", "quant_method", "attn_backend")
            ):
                place = f"{type(module).__name__}.{key}"
                found.setdefault(place, set()).add(_named(value))
                if key == "quant_method":  # it has chosen the experts' kernels, and keeps the choice
                    for own, chosen in vars(value).items():
                        if own.endswith("backend") and chosen is not None:
                            found.setdefault(f"{place}.{own}", set()).add(_named(chosen))
    return {
        "backends": {name: sorted(values) for name, values in sorted(found.items())},
        "attention": sorted(
            {
                v
                for name, values in found.items()
                for v in values
                if re.search(r"(?i)att(n|ention)\w*\.impl$", name)
            }
        ),
        "graph_mode": _name(compilation.cudagraph_mode),
        "graph_sizes": [int(size) for size in compilation.cudagraph_capture_sizes or ()],
        "compilation": _name(compilation.mode),
        "sampler": sorted(
            {type(getattr(runner, n)).__name__ for n in SAMPLERS if getattr(runner, n, None) is not None}
        ),
        "runner": f"{type(runner).__module__}.{type(runner).__name__}",
        "all_reduce": _all_reduce(),
        "decode": None if decode is None else f"{type(decode).__module__}.{type(decode).__name__}",
        "dtype": str(config.model_config.dtype),
        "eager": bool(config.model_config.enforce_eager),
    }


def _all_reduce() -> str:
    """What carries the tensor-parallel sums."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return "none: one rank"
    communicator = group.device_communicator
    parts = [
        name
        for name in ("ca_comm", "qr_comm", "symm_mem_comm", "fi_ar_comm", "pynccl_comm")
        if getattr(getattr(communicator, name, None), "disabled", True) is False
    ]
    return ", ".join(parts) or type(communicator).__name__


def _language_model(runner: Any) -> Any:
    model = getattr(runner, "model", None)
    inner = getattr(model, "get_language_model", None)
    return inner() if callable(inner) else model


def _named(value: object) -> str:
    if isinstance(value, str | int | float | bool):
        return str(value)
    kind = value if isinstance(value, type) else type(value)
    return getattr(value, "name", None) or kind.__name__


def _name(mode: object) -> str:
    return str(getattr(mode, "name", mode))
