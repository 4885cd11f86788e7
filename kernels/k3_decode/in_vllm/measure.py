"""One vLLM engine in this process and everything that two arms are compared by.

    python -m k3_decode.in_vllm.measure NAME --model DIR --out DIR [--engine-args JSON] [--rows 1,2,4,8,16]
        [--wait-for N --meet DIR]

Writes NAME.json: log-probabilities along forced tokens (vLLM's trace replay: tokens are given, logits are
the model's own), step times, replays of the model's graph alone, kernels of profiled steps and what each
layer took of them, the ops' own launch counters, the dispatcher's decisions, draws at a temperature, answers
under a schema, what was selected. With --wait-for several
engines start side by side and are measured one after another: an engine holds the GPU alone while it is
timed.
"""

import argparse
import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from k3_decode.in_vllm.compare import kernel_names, parts_of

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process, where a profiler sees it

__all__ = ["main"]

STARTED = time.monotonic()
DEFAULTS: dict[str, Any] = {
    "load_format": "dummy", "max_model_len": 2048, "max_num_seqs": 16, "seed": 0,
    "kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.3, "moe_backend": "marlin",
    "attention_backend": "FLASHMLA", "async_scheduling": False,
    "enable_prefix_caching": False, "enable_trace_replay": True, "max_logprobs": 20,
}  # fmt: skip
"""`kv_cache_memory_bytes` skips the memory profiling, so that engines can share a GPU."""
PARTS = ("forced", "steps", "kernels", "draws", "structured", "replays")
PROMPTS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 70, 130, 200, 3, 7, 64, 63)
FORCED_TOKENS = 24
TOP = 20
WARM_STEPS, TIMED_STEPS, PROFILED_STEPS = 10, 60, 6
WARM_REPLAYS, TIMED_REPLAYS, REPEATS = 20, 60, 7
SCHEMA = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["us", "ms"]}, "name": {"type": "string", "pattern": "^[a-z]{3}$"},
        "is_fast": {"type": "boolean"},
    },
    "required": ["unit", "name", "is_fast"],
    "additionalProperties": False,
}  # fmt: skip


def main() -> None:
    """Run one arm."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"name": options.name, "engine_args": options.engine_args}

    def keep() -> None:
        (options.out / f"{options.name}.json").write_text(json.dumps(found))

    engine = _Engine(options.model, DEFAULTS | options.engine_args)
    found["selected"], found["ready_s"] = engine.selected(), round(time.monotonic() - STARTED, 1)
    _say(options.name, "ready")
    _meet(options)
    parts = (
        ("forced", lambda: {str(rows): engine.forced(rows) for rows in options.rows}),
        ("steps", lambda: {str(rows): engine.timed(rows) for rows in options.rows}),
        ("kernels", lambda: {str(rows): engine.profiled(rows) for rows in options.rows}),
        ("draws", engine.draws),
        ("structured", engine.structured),
        ("replays", lambda: {str(rows): engine.replayed(rows) for rows in options.rows}),
    )
    with _alone(options.meet):
        for part, take in parts:
            if part not in options.parts:
                continue
            try:
                found[part] = take()
            except Exception as error:  # noqa: BLE001  (one part that fails must not cost the others)
                found[part] = {"failed": f"{type(error).__name__}: {error}"}
                _say(options.name, part, "FAILED", str(error)[:300])
            keep()
            _say(options.name, part, "done")
    found["cut"] = {rows: cut for rows, told in found.get("kernels", {}).items() if (cut := _cut(told))}
    found["decisions"] = _decisions(options.engine_args)
    keep()
    steps = found.get("steps", {})
    _say(options.name, "steps us", {rows: round(v["us"]) for rows, v in steps.items() if "us" in v})


def _cut(told: Any) -> dict[str, Any] | None:
    """Profiled steps by layer and by kernel; None where they cannot be cut."""
    try:
        events = [(e[0], e[1], e[2], e[3]) for e in told["events"]]
        names = kernel_names(events)
        return {"layers": parts_of(events), "names": [(name, *sums) for name, sums in sorted(names.items())]}
    except (KeyError, TypeError, ValueError):
        return None


def _decisions(engine_args: dict[str, Any]) -> list[tuple[int, str, str]]:
    """(rows, path, reason) of every step that was decided, from the ledger that the engine was given."""
    extra = engine_args.get("additional_config") or {}
    path = Path(extra.get("k3_decode_ledger", ""))
    if not path.is_file():
        return []
    told = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(entry.get("tokens", entry["rows"]), entry["path"], entry["reason"]) for entry in told]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name")
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engine-args", type=json.loads, default={})
    parser.add_argument(
        "--rows", type=lambda text: [int(word) for word in text.split(",")], default=[1, 2, 4, 8, 16]
    )
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--wait-for", type=int, default=1)
    parser.add_argument("--meet", type=Path, default=Path("/tmp/k3_meet"))
    parser.add_argument("--patience", type=float, default=150)
    return parser.parse_args()


def _say(*words: object) -> None:
    print(f"@@ {time.monotonic() - STARTED:6.1f}s", *words, flush=True)  # noqa: T201


def _meet(options: argparse.Namespace) -> None:
    """Until as many engines are ready as were asked for, or patience ends."""
    options.meet.mkdir(parents=True, exist_ok=True)
    (options.meet / f"{options.name}.ready").touch()
    limit = time.monotonic() + options.patience
    while len(list(options.meet.glob("*.ready"))) < options.wait_for and time.monotonic() < limit:
        time.sleep(0.2)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One engine at a time."""
    with (folder / "gpu.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Engine:
    """vLLM's engine and what is asked of it."""

    def __init__(self, model: str, arguments: dict[str, Any]) -> None:
        import torch
        from vllm import LLM

        self._torch = torch
        self._llm = LLM(model=model, **arguments)
        self._engine = self._llm.llm_engine
        worker = self._engine.engine_core.engine_core.model_executor.driver_worker.worker
        self._model, self._runner = worker.get_model(), worker.model_runner
        self._vocab = self._engine.vllm_config.model_config.get_vocab_size()

    def selected(self) -> dict[str, Any]:
        """Graph mode and backends."""
        config = self._engine.vllm_config
        found: dict[str, int] = {}
        for module in self._model.modules():
            for key, value in vars(module).items():
                if key.endswith("backend") and isinstance(value, str):
                    name = f"{type(module).__name__}.{key}={value}"
                    found[name] = found.get(name, 0) + 1
        decode = getattr(self._model, "specialized_decode", None)
        return {
            "graphs": str(config.compilation_config.cudagraph_mode),
            "sizes": list(config.compilation_config.cudagraph_capture_sizes or ()),
            "decode": None if decode is None else f"{type(decode).__module__}.{type(decode).__name__}",
            "backends": found,
        }

    def forced(self, rows: int) -> dict[str, Any]:
        """Log-probabilities of `rows` requests at once along tokens that are given."""
        from vllm import SamplingParams

        prompts, asked = [], []
        for place in range(rows):
            draws = Random(1000 + place)
            length = PROMPTS[place % len(PROMPTS)]
            prompts.append({"prompt_token_ids": [draws.randrange(5, self._vocab) for _ in range(length)]})
            trace = [draws.randrange(5, self._vocab) for _ in range(FORCED_TOKENS)]
            asked.append(
                SamplingParams(
                    temperature=0,
                    max_tokens=FORCED_TOKENS,
                    ignore_eos=True,
                    logprobs=TOP,
                    trace_decode_token_ids=trace,
                )
            )
        before = self._launches()
        answers = self._llm.generate(prompts, asked, use_tqdm=False)
        told = [
            [{str(t): round(e.logprob, 5) for t, e in place.items()} for place in answer.outputs[0].logprobs]
            for answer in answers
        ]
        ids = [list(answer.outputs[0].token_ids) for answer in answers]
        is_forced = all(ids[i] == asked[i].trace_decode_token_ids for i in range(rows))
        return {"top": told, "ids": ids, "is_forced": is_forced, "launches": _less(self._launches(), before)}

    def timed(self, rows: int) -> dict[str, Any]:
        """Wall time of a decode step of `rows` requests, the host's part included."""
        self._begin(rows, WARM_STEPS + 3 * TIMED_STEPS)
        self._step(WARM_STEPS)
        before, times = self._launches(), []
        for _ in range(3):
            begin = time.perf_counter()
            self._step(TIMED_STEPS)
            times.append((time.perf_counter() - begin) / TIMED_STEPS * 1e6)
        launches = _less(self._launches(), before)
        self._drain()
        return {"us": min(times), "all_us": times, "launches": launches, "steps": 3 * TIMED_STEPS}

    def profiled(self, rows: int) -> dict[str, Any]:
        """Kernels of some decode steps: (start us, duration us, stream, name)."""
        from torch.profiler import ProfilerActivity, profile

        self._begin(rows, WARM_STEPS + PROFILED_STEPS)
        self._step(WARM_STEPS)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self._step(PROFILED_STEPS)
        trace = Path(f"/tmp/k3_trace_{os.getpid()}_{rows}.json")
        profiler.export_chrome_trace(str(trace))
        events = [
            e
            for e in json.loads(trace.read_text())["traceEvents"]
            if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        ]
        events.sort(key=lambda event: float(event["ts"]))
        self._drain()
        first = events[0]["ts"] if events else 0
        return {
            "steps": PROFILED_STEPS,
            "events": [
                (round(e["ts"] - first, 2), e["dur"], e["args"].get("stream"), e["name"][:120])
                for e in events
            ],
        }

    def replayed(self, rows: int) -> dict[str, Any]:
        """The model's own graph of a decode step of `rows` requests, replayed back to back: microseconds by
        events, with neither the host nor a profiler in them. Its inputs are those of the last such step.
        """
        self._begin(rows, WARM_STEPS)
        self._step(WARM_STEPS)
        graph = self._full_graph(rows)
        event: Any = self._torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        before, times = self._launches(), []
        for _ in range(WARM_REPLAYS):
            graph.replay()
        for _ in range(REPEATS):
            begin.record()
            for _ in range(TIMED_REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / TIMED_REPLAYS)
        launches = _less(self._launches(), before)
        self._drain()
        return {"us": sorted(times)[len(times) // 2], "all_us": times, "launches": launches}

    def _full_graph(self, rows: int) -> Any:
        """vLLM's graph for that many decode rows; raises `ValueError` where it captured none."""
        graphs = self._runner.cudagraph_manager.graphs
        found = [graph for desc, graph in graphs.items() if desc.num_tokens == rows and desc.num_reqs == rows]
        if len(found) != 1:
            raise ValueError(f"{len(found)} full graphs of {rows} rows")
        return found[0]

    def draws(self) -> dict[str, Any]:
        """Tokens drawn at temperature 1, each with the likeliest ones and their log-probabilities."""
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": [5 + n, 9]} for n in range(8)]
        asked = [
            SamplingParams(temperature=1.0, max_tokens=48, ignore_eos=True, logprobs=TOP, seed=n)
            for n in range(8)
        ]
        answers = self._llm.generate(prompts, asked, use_tqdm=False)
        rows = []
        for answer in answers:
            best = answer.outputs[0]
            for token, told in zip(best.token_ids, best.logprobs, strict=True):
                own = told[token]
                above = sorted((e.logprob for t, e in told.items() if e.logprob > own.logprob), reverse=True)
                rows.append((round(own.logprob, 5), own.rank, [round(v, 5) for v in above]))
        return {"rows": rows}

    def structured(self) -> dict[str, Any]:
        """Answers under a schema."""
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        schema = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
        asked = SamplingParams(temperature=1.0, max_tokens=120, seed=3, structured_outputs=schema)
        answers = self._llm.generate([{"prompt_token_ids": [7 + n]} for n in range(4)], asked, use_tqdm=False)
        return {"texts": [(a.outputs[0].text, a.outputs[0].finish_reason) for a in answers]}

    def _begin(self, rows: int, steps: int) -> None:
        from vllm import SamplingParams

        asked = SamplingParams(temperature=0, max_tokens=steps + 20, ignore_eos=True)
        for place in range(rows):
            self._engine.add_request(
                f"{time.monotonic_ns()}-{place}", {"prompt_token_ids": [5 + place]}, asked
            )

    def _step(self, count: int) -> None:
        for _ in range(count):
            self._engine.step()
        self._torch.cuda.synchronize()

    def _drain(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _launches(self) -> list[int]:
        decode = getattr(self._model, "specialized_decode", None)
        if decode is None or not hasattr(decode, "launches"):
            return []
        self._torch.cuda.synchronize()
        counted: list[int] = decode.launches.tolist()
        return counted


def _less(after: Sequence[int], before: Sequence[int]) -> list[int]:
    return [a - b for a, b in zip(after, before, strict=True)]


if __name__ == "__main__":
    main()
