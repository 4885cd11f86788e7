"""Which fault, at which size, each measure of the canary notices: `python -m k3_decode.canary.sensitivity`.

Replays question sets through a stock path, through right paths that round elsewhere (`replay.BENIGN`) and
through faulty ones, always with benign roundings on the faulty side. Four measures for each question:
exact answer, drift (mean |change of log-probability| of the right token), peak (largest such change) and
shift (mean change with its sign, which rounding averages out and a systematic error does not). A fault of a
size is detected when its set's figure lies above the 95 % quantile of what benign paths give on resampled
sets of the same size: 5 % false alarms. A set's figure is the mean over questions; of shift, its size.

Results are a folder with one file of JSON lines a set, a line an arm; what is there already is not measured
again. `--minutes` ends a piece early.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path as File

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from k3_decode.canary.export import read_safetensors
from k3_decode.canary.faults import FAULTS
from k3_decode.canary.replay import BENIGN, Caches, Model, Path, advance, load_model
from k3_decode.canary.tasks import Sample, chain_samples, echo_samples, mrcr_samples
from k3_decode.shapes import CANARY

__all__ = [
    "FAULTY_ROUNDINGS",
    "MEASURES",
    "RESULTS_FOLDER",
    "SETS",
    "Measured",
    "QuestionSet",
    "Results",
    "detected",
    "figures",
    "measure",
    "prepare",
    "read_results",
    "thresholds",
]

MEASURES = ("exact", "drift", "peak", "shift")
SEED = 505
"""Of the questions: held out, as training draws from seeds of another kind."""
FAULTY_ROUNDINGS = BENIGN["fp32 conv output"]
RESULTS_FOLDER = File(__file__).with_name("sensitivity")
_CHUNK = 256


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """Questions of one task and one length, replayed together."""

    name: str
    task: str
    tokens: int
    """mrcr: context; chain: generated tokens."""
    count: int
    is_nominal_only: bool = False
    """Faults at their nominal size only."""
    kv_dtype: str = "bf16"
    """Of the KV cache, in every arm."""

    def samples(self) -> tuple[Sample, ...]:
        """The questions."""
        return _MAKERS[self.task](SEED, self.count, self.tokens)


_MAKERS: Mapping[str, Callable[[int, int, int], tuple[Sample, ...]]] = {
    "chain_canary": chain_samples,
    "mrcr_canary": mrcr_samples,
    "echo_canary": echo_samples,
}
SETS = (
    QuestionSet("chain_1000", "chain_canary", 1000, 64),
    QuestionSet("mrcr_2048", "mrcr_canary", 2048, 128),
    QuestionSet("mrcr_8192", "mrcr_canary", 8192, 64),
    QuestionSet("mrcr_8192_fp8", "mrcr_canary", 8192, 64, kv_dtype="fp8"),
    QuestionSet("echo_8192", "echo_canary", 8192, 64),
    QuestionSet("chain_504", "chain_canary", 504, 4),
    QuestionSet("mrcr_512", "mrcr_canary", 512, 16),
    QuestionSet("chain_4000", "chain_canary", 4000, 32, is_nominal_only=True),
)
"""The two short sets are those that a test measures again on a CPU."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One arm on one set; per question, in order."""

    set: str
    arm: str
    """`stock`, `benign/NAME` or `FAULT/SIZE`."""
    exact: tuple[bool, ...]
    drift: tuple[float, ...]
    peak: tuple[float, ...]
    shift: tuple[float, ...]
    margin: float
    """Smallest margin (log-probability of the right token less the best other one) over all questions."""


Results = Mapping[tuple[str, str], Measured]
"""By (set, arm)."""


@dataclass(slots=True)
class _Prepared:
    """A set after its prompts: caches, forced tokens, and the stock path's log-probabilities."""

    caches: Caches
    inputs: Tensor
    right: Tensor
    stock: Tensor | None = None


def prepare(model: Model, samples: Iterable[Sample], kv_dtype: str = "bf16") -> _Prepared:
    """Takes all prompts but their last token in, fault-free."""
    questions = list(samples)
    device = model.tensors["lm_head.weight"].device
    prompt = torch.tensor([s.prompt for s in questions], device=device)
    right = torch.tensor([s.answer for s in questions], device=device)
    caches = Caches(kv_dtype=kv_dtype)
    for start in range(0, prompt.shape[1] - 1, _CHUNK):
        advance(model, caches, prompt[:, start : min(start + _CHUNK, prompt.shape[1] - 1)], Path())
    return _Prepared(caches, torch.cat([prompt[:, -1:], right[:, :-1]], 1), right)


def measure(model: Model, prepared: _Prepared, path: Path, set_name: str, arm: str) -> Measured:
    """One arm; the first call on a set must be the stock path's."""
    caches = prepared.caches.copy()
    path.seam = caches.position
    logits = torch.cat(
        [advance(model, caches, part, path) for part in torch.split(prepared.inputs, _CHUNK, 1)], 1
    )
    logp = torch.log_softmax(logits, -1)
    of_right = logp.gather(2, prepared.right[..., None])[..., 0]
    others = logp.scatter(2, prepared.right[..., None], -torch.inf).amax(-1)
    margin = (of_right - others).nan_to_num(nan=-torch.inf)
    if prepared.stock is None:
        prepared.stock = of_right
    change = (of_right - prepared.stock).nan_to_num(nan=-1e3)
    return Measured(
        set_name,
        arm,
        tuple((margin > 0).all(1).tolist()),
        tuple(round(x, 7) for x in change.abs().mean(1).tolist()),
        tuple(round(x, 6) for x in change.abs().amax(1).tolist()),
        tuple(round(x, 8) for x in change.mean(1).tolist()),
        round(float(margin.clamp(min=-1e3).min()), 4),
    )


def arms(is_nominal_only: bool = False) -> Iterator[tuple[str, Path]]:
    """Stock, benign, then every fault at every size, nominal sizes first."""
    yield "stock", Path()
    for name, roundings in BENIGN.items():
        yield f"benign/{name}", Path(0.0, roundings)
    sized = [(fault, size) for fault in FAULTS for size in fault.sizes]
    for fault, size in sorted(sized, key=lambda pair: pair[1] != pair[0].nominal):
        if is_nominal_only and size != fault.nominal:
            return
        yield f"{fault.name}/{size:g}", fault.planted(size, FAULTY_ROUNDINGS)


def read_results(folder: File) -> dict[tuple[str, str], Measured]:
    """Results by (set, arm)."""
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            exact, drift, peak, shift = (tuple(entry[name]) for name in MEASURES)
            result = Measured(entry["set"], entry["arm"], exact, drift, peak, shift, entry["margin"])
            found[result.set, result.arm] = result
    return found


def thresholds(results: Results, set_name: str) -> dict[str, float]:
    """95 % quantile of each measure's set figure over benign paths and resampled questions."""
    rng = np.random.default_rng(3)
    stock = results[set_name, "stock"]
    null: dict[str, list[float]] = {m: [] for m in MEASURES}
    for name in BENIGN:
        benign = results[set_name, f"benign/{name}"]
        n = len(benign.exact)
        for _ in range(500):
            chosen = rng.integers(0, n, n)
            for m, values in _by_question(benign, stock).items():
                null[m].append(_figure(m, values[chosen]))
    return {m: float(np.quantile(values, 0.95)) for m, values in null.items()}


def detected(result: Measured, stock: Measured, threshold: dict[str, float]) -> dict[str, bool]:
    """Whether each measure's figure of an arm lies above its threshold."""
    return {m: figure > threshold[m] for m, figure in figures(result, stock).items()}


def figures(result: Measured, stock: Measured) -> dict[str, float]:
    """Each measure's figure of an arm's set; of exact, the share lost."""
    return {m: _figure(m, values) for m, values in _by_question(result, stock).items()}


def _figure(measure_name: str, values: npt.NDArray[np.float64]) -> float:
    mean = float(np.mean(values))
    return abs(mean) if measure_name == "shift" else mean


def _by_question(result: Measured, stock: Measured) -> dict[str, npt.NDArray[np.float64]]:
    """Lost exactness is 1 where right before and wrong now, -1 the other way round."""
    lost = np.array(stock.exact, float) - np.array(result.exact, float)
    rest = {m: np.array(getattr(result, m)) for m in MEASURES[1:]}
    return {"exact": lost, **rest}


def main(arguments: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m k3_decode.canary.sensitivity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--weights", type=File, default=File(__file__).with_name("weights.safetensors"))
    parser.add_argument("--out", type=File, default=RESULTS_FOLDER)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=4.5)
    parser.add_argument("--set", action="append", help="only these sets", choices=[s.name for s in SETS])
    args = parser.parse_args(arguments)
    started = time.monotonic()
    model = load_model(read_safetensors(args.weights), CANARY, args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    done = read_results(args.out)
    for questions in SETS:
        todo = [
            (arm, path) for arm, path in arms(questions.is_nominal_only) if (questions.name, arm) not in done
        ]
        if not todo or (args.set and questions.name not in args.set):
            continue
        prepared = prepare(model, questions.samples(), questions.kv_dtype)
        stock = measure(model, prepared, Path(), questions.name, "stock")
        for arm, path in todo:
            if time.monotonic() - started > 60 * args.minutes:
                return
            result = stock if arm == "stock" else measure(model, prepared, path, questions.name, arm)
            with (args.out / f"{questions.name}.jsonl").open("a") as file:
                print(json.dumps(asdict(result)), file=file, flush=True)
            figures = (
                f"exact {np.mean(result.exact):.3f}, drift {np.mean(result.drift):.5f}, "
                f"peak {np.mean(result.peak):.4f}, shift {np.mean(result.shift):+.6f}, "
                f"margin {result.margin:.3f}"
            )
            print(f"{time.monotonic() - started:6.1f} s {questions.name} {arm}: {figures}", flush=True)


if __name__ == "__main__":
    main()
