"""Whole layers of one rank on a GPU: the fused ops against stock, in one process, interleaved.

    python -m k3_decode.peers.layer_bench --kind kda --tp 8 --batch 1,8,64 --out DIR

Each arm runs the same eight distinct layers (2 GB each at TP8) in one CUDA graph of its own; samples of the
arms alternate, and one arm of each side is sampled twice, which gives the noise floor. Collectives are left
out on both sides. Two layouts: `whole`, router and latent projections replicated as stock has them;
`sharded`, a rank's share of them, its parts stored where the exchange puts them and the peers' parts read
from there.
Before timing, layers run alone on the same inputs in both arms and are compared with float64, token by token.
Writes DIR/KIND-TP.jsonl: one record a cell, with every sample.
"""

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from k3_decode.op_table import load_ops
from k3_decode.overlap import aside_from
from k3_decode.peers.layer_arms import Case, Memory, OptimisedArm, draw_layer, make_memory
from k3_decode.peers.layer_forms import forms_of
from k3_decode.peers.layer_oracle import row_errors, truth_before_experts
from k3_decode.peers.layer_slice import sharing
from k3_decode.peers.timing import capture, kernels_of
from k3_decode.rank_weights import LayerWeights

BATCHES = (1, 2, 3, 4, 7, 8, 16, 17, 32, 64)
LAYERS = 8
SAMPLE_MS = 4.0
POOL_BYTES = 12 * 2**30
PAGE_BYTES = 64 * 576 * 2


def interleaved(
    graphs: dict[str, tuple[Any, Callable[[], object]]], units: int, rounds: int
) -> dict[str, list[float]]:
    """Microseconds a unit of every graph, one sample a round each; the order turns from round to round."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def sample(graph: Any, reset: Callable[[], object], replays: int) -> float:
        reset()
        start.record()
        for _ in range(replays):
            graph.replay()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) * 1e3 / replays / units

    replays = {}
    for name, (graph, reset) in graphs.items():
        for _ in range(2):
            sample(graph, reset, 2)
        one_ms = sample(graph, reset, 2) * units / 1e3
        replays[name] = max(1, min(100, round(SAMPLE_MS / one_ms)))
    found: dict[str, list[float]] = {name: [] for name in graphs}
    names = list(graphs)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found[name].append(sample(*graphs[name], replays[name]))
    return found


class Bench:
    """The layers of one kind at one TP, in both arms."""

    def __init__(self, arguments: argparse.Namespace, kind: str, tp: int) -> None:
        from k3_decode.peers.stock_arm import marlin_weights, stock_weights
        from k3_decode.peers.stock_kernels import StockKernels

        self.arguments, self.kind, self.tp = arguments, kind, tp
        self.device = torch.device("cuda")
        self.kernels = StockKernels()
        self.shapes = Case(kind, tp, 1).shapes
        self.table = sharing(load_ops("cute", self.shapes, self.device))
        started = time.time()
        self.layers: list[LayerWeights] = []
        self.stock: list[dict[str, Any]] = []
        generator = torch.Generator(self.device).manual_seed(arguments.seed)
        for _ in range(arguments.layers):
            layer = draw_layer(kind, self.shapes, generator)
            self.layers.append(layer)
            self.stock.append({**stock_weights(layer), **marlin_weights(layer)})
        self.humming: Any = None
        if arguments.humming:
            from k3_decode.peers.bench_humming import HummingExperts
            from k3_decode.peers.stock_layer import dims

            self.humming = HummingExperts(dims(tp))
            self.humming.raw = None
            self.stock = [{**weights, **self.humming.weights()} for weights in self.stock]
        self.pool = None
        if kind == "mla":
            pages = arguments.pool // PAGE_BYTES
            self.pool = torch.empty((pages, 64, 576), dtype=torch.bfloat16, device=self.device)
            self.pool.normal_(generator=generator)
        torch.cuda.synchronize()
        used = torch.cuda.memory_allocated() / 1e9
        say(f"{kind} tp{tp}: weights in {time.time() - started:.1f} s, {used:.0f} GB")
        say(f"stock: {self.kernels.ext} {self.kernels.err}")

    def memory(self, case: Case) -> Memory:
        """Equal memories at every call."""
        generator = torch.Generator(self.device).manual_seed(self.arguments.seed + 1)
        return make_memory(case, len(self.layers), self.pool, generator)

    def cell(self, case: Case) -> dict[str, Any]:
        """One cell: correctness, then times, kernels and launches of every arm."""
        from k3_decode.peers.stock_arm import StockArm

        record: dict[str, Any] = {
            "kind": case.kind,
            "tp": case.tp,
            "requests": case.requests,
            "context": case.context,
        }
        record["layers"] = len(self.layers)
        arms: dict[str, Any] = {}
        for layout in self.arguments.layouts:
            arms[layout] = OptimisedArm(self.layers, case, self.memory(case), self.table, layout=layout)
        whole = OptimisedArm(self.layers, case, self.memory(case), self.table)
        whole.step()
        for arm in arms.values():
            arm.fill_peers(whole)
        last = self.arguments.layouts[-1]
        for rows in self.arguments.variants:
            name = f"{last}.aside{rows}"
            arms[name] = OptimisedArm(
                self.layers, case, self.memory(case), self.table, layout=last, schedule=aside_from(rows)
            )
            arms[name].fill_peers(whole)
        cores = (
            ("flashmla", "fa3")
            if case.kind == "mla" and self.kernels.ext.get("_vllm_fa3_C") == "ok"
            else ("flashmla",)
        )
        for core in cores:
            for name, humming in (("marlin", None), ("humming", self.humming)):
                if name == "humming" and humming is None:
                    continue
                key = f"stock.{name}" + (f".{core}" if case.kind == "mla" else "")
                arms[key] = StockArm(
                    self.kernels, self.stock, case, self.memory(case), self.pool, humming, core
                )
        record["correctness"] = attempted(lambda: self.correctness(case))
        graphs = {}
        record["arms"] = {}
        for name, arm in arms.items():
            found: dict[str, Any] = {}
            record["arms"][name] = found
            try:
                arm.reset()
                graph = capture(arm.step, 1)
                arm.reset()
                graph.replay()
                torch.cuda.synchronize()
                found["is_finite"] = bool(torch.isfinite(arm.step().float()).all())
                graphs[name] = (graph, arm.reset)
                if name in self.arguments.layouts or name.startswith("stock"):
                    profile = kernels_of(graph, len(self.layers))
                    found |= {key: profile[key] for key in ("kernels", "memops", "sum_us", "wall_us")}
                    found["by_kernel"] = profile["list"][:40]
                if isinstance(arm, OptimisedArm):
                    arm.chain.launches.zero_()
                    arm.reset()
                    graph.replay()
                    torch.cuda.synchronize()
                    found["launches"] = [n / len(self.layers) for n in arm.chain.launches.tolist()]
                    found["experts"] = arm.buffer("ids").unique().numel()
                else:
                    found["experts"] = sum(i.unique().numel() for i in arm.layer_ids) / len(self.layers)
            except Exception as error:  # noqa: BLE001 - one arm that fails must not hide the others; it is reported
                found["error"] = f"{type(error).__name__}: {str(error)[-400:]}"
                traceback.print_exc(limit=-4, file=sys.stdout)
                torch.cuda.synchronize()
        for name in list(graphs):
            if name == self.arguments.layouts[0] or name.startswith("stock.marlin"):
                graphs[f"{name} again"] = graphs[name]
        for name, samples in interleaved(graphs, len(self.layers), self.arguments.rounds).items():
            record["arms"].setdefault(name, {})["samples_us"] = samples
        return record

    def correctness(self, case: Case) -> dict[str, Any]:
        """Errors of single layers against float64 on equal inputs, by arm."""
        from k3_decode.peers.stock_arm import StockArm

        found: dict[str, Any] = {}
        for index in self.arguments.checked:
            fresh = self.memory(case)
            layer = self.layers[index]
            truth = truth_before_experts(layer, index, case, fresh, fresh.embedding, fresh.delta)
            stock_arm = StockArm(self.kernels, self.stock, case, self.memory(case), self.pool)
            plain: OptimisedArm | None = None
            results = {"stock": stock_arm.one_layer(index, fresh.embedding, fresh.delta)}
            for layout in self.arguments.layouts:
                memory = self.memory(case)
                memory.caches.kda = {0: memory.caches.kda[index]} if case.kind == "kda" else {}
                memory.caches.mla = {0: memory.caches.mla[index]} if case.kind == "mla" else {}
                arm = OptimisedArm([layer], case, memory, self.table, layout=layout)
                if layout == "sharded" and plain is not None:
                    arm.fill_peers(plain)
                out = arm.step().clone()
                plain = arm
                results[layout] = {
                    "out": out,
                    "prefix": arm.buffer("prefix_a").clone(),
                    "ids": arm.buffer("ids"),
                }
                if case.kind == "kda":
                    results[layout]["state"] = memory.caches.kda[0].recurrent
                if case.kind == "mla":
                    slot = memory.step.slot_mapping
                    results[layout]["row"] = memory.caches.mla[0].view(-1, 576)[slot].clone()
            for name, result in results.items():
                errors = row_errors(result["out"], truth.after(result["ids"]))
                entry = {
                    "worst": float(errors.max()),
                    "median": float(errors.median()),
                    "prefix": float(row_errors(result["prefix"], truth.prefix).max()),
                    "regret": truth.regret(result["ids"]),
                    "errors": [round(e, 6) for e in errors.tolist()],
                }
                if truth.state is not None:
                    entry["state"] = float(
                        (result["state"][1:] - truth.state[1:]).norm() / truth.state[1:].norm()
                    )
                found[f"{name}.layer{index}"] = entry
        return found


def attempted(work: Callable[[], Any]) -> Any:
    """The result, or the error as text: it is a finding of the cell."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - reported in the record, and the times still count
        traceback.print_exc(limit=-5, file=sys.stdout)
        torch.cuda.synchronize()
        return {"error": f"{type(error).__name__}: {str(error)[-400:]}"}


def say(text: str) -> None:
    print(text, flush=True)


def shown(record: dict[str, Any]) -> str:
    """One line a cell."""
    parts = [f"{record['kind']}{record['context'] or ''} tp{record['tp']} B{record['requests']}"]
    for name, arm in record["arms"].items():
        if "samples_us" in arm:
            kernels = f" k{arm['kernels']:.1f}+{arm['memops']:.1f}" if "kernels" in arm else ""
            parts.append(f"{name} {statistics.median(arm['samples_us']):.1f}{kernels}")
        elif "error" in arm:
            parts.append(f"{name} ERR {arm['error'][-160:]}")
    return " | ".join(parts)


def shown_errors(record: dict[str, Any]) -> str:
    found = record["correctness"]
    if "error" in found:
        return f"    correctness {found['error']}"
    return "    " + " | ".join(
        f"{name} {entry['worst']:.2e}/{entry['median']:.2e} regret {entry['regret']:.1e}"
        + (f" state {entry['state']:.1e}" if "state" in entry else "")
        for name, entry in found.items()
    )


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser.add_argument("--pairs", default="kda:8", help="KIND:TP, comma-separated")
    parser.add_argument("--batch", default=list(BATCHES), type=numbers)
    parser.add_argument("--context", default=1024, type=int)
    parser.add_argument("--layouts", default="whole,sharded", type=lambda text: text.split(","))
    parser.add_argument(
        "--variants",
        default=[],
        type=numbers,
        help="more forms of the last layout: rows from which the shared expert runs aside",
    )
    parser.add_argument("--layers", default=LAYERS, type=int)
    parser.add_argument("--checked", default=[0], type=numbers, help="layers compared with float64")
    parser.add_argument("--rounds", default=15, type=int)
    parser.add_argument("--humming", action="store_true")
    parser.add_argument("--pool", default=POOL_BYTES, type=int)
    parser.add_argument("--seed", default=7, type=int)
    parser.add_argument("--objects", type=Path, help="folder of compiled kernels; filled first by processes")
    parser.add_argument("--out", type=Path, default=Path())
    arguments = parser.parse_args(words)
    arguments.pairs = [(pair.split(":")[0], int(pair.split(":")[1])) for pair in arguments.pairs.split(",")]
    return arguments


@torch.no_grad()
def main() -> int:
    arguments = parsed()
    started, failed = time.time(), False
    context: Any = nullcontext()
    if arguments.objects is not None:
        from k3_decode.kernel_objects import build_objects, use_objects

        cases = [
            Case(kind, tp, requests, arguments.context if kind == "mla" else 0)
            for kind, tp in arguments.pairs
            for requests in arguments.batch
        ]
        forms = forms_of(cases, arguments.layouts)
        build_objects(forms, arguments.objects, 16)
        say(f"{len(forms)} kernels compiled, {time.time() - started:.1f} s")
        context = use_objects(arguments.objects)
    with context:
        for kind, tp in arguments.pairs:
            bench = Bench(arguments, kind, tp)
            for requests in arguments.batch:
                case = Case(kind, tp, requests, arguments.context if kind == "mla" else 0)
                try:
                    record = bench.cell(case)
                except Exception:  # noqa: BLE001 - the next cell still runs; the exit code tells
                    traceback.print_exc(limit=-5, file=sys.stdout)
                    torch.cuda.synchronize()
                    failed = True
                    continue
                with (arguments.out / "layers.jsonl").open("a") as file:
                    file.write(json.dumps(record) + "\n")
                say(f"{shown(record)}  t {time.time() - started:.1f}\n{shown_errors(record)}")
            del bench
            torch.cuda.empty_cache()
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
