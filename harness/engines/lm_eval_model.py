"""Models as lm-eval sees them: registered as `fasttrack`, driven in this process or answering through an
engine.

Forced texts are token ids in decimal, joined by spaces; their log-probabilities are kept in `forced`, so
that the stage has the raw observations and not lm-eval's aggregates. Questions are put to whoever was given
to answer them: the stage asks every arm and tells lm-eval what stock said. lm-eval gives the prompts and
scores answers.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from harness.domain.pack import Session
from harness.engines.in_process import force

__all__ = ["FasttrackLM", "decode_ids", "encode_ids", "run_task", "run_yaml_task", "task_file"]


def encode_ids(tokens: Sequence[int]) -> str:
    """Token ids as text."""
    return " ".join(map(str, tokens))


def decode_ids(text: str) -> tuple[int, ...]:
    """Text of `encode_ids` as token ids; raises `ValueError` on anything else."""
    return tuple(int(word) for word in text.split())


@register_model("fasttrack")
class FasttrackLM(LM):  # type: ignore[misc]  # lm-eval ships no types
    """One open session to force texts through, or somebody who answers all prompts at once, or both.

    `prompt_tokens` of each scored text go in by prefill, the rest is forced token by token.
    """

    def __init__(
        self,
        session: Session | None = None,
        batch: int = 1,
        prompt_tokens: int = 1,
        answer_all: Callable[[Sequence[str]], Sequence[str]] | None = None,
    ) -> None:
        super().__init__()
        self._session, self._batch, self._prompt_tokens = session, batch, prompt_tokens
        self._answer_all = answer_all
        self.forced: dict[str, Any] = {}
        """[positions, vocab] log-probabilities by text."""

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each text after its first `prompt_tokens`; texts of a batch have one length."""
        texts = [decode_ids(request.args[0]) for request in requests]
        totals: list[float] = []
        for start in range(0, len(texts), self._batch):
            part = texts[start : start + self._batch]
            n = self._prompt_tokens
            rows = self._force([t[:n] for t in part], [t[n:-1] for t in part])
            for text, logprobs in zip(part, rows, strict=True):
                self.forced[encode_ids(text)] = logprobs
                totals.append(sum(float(logprobs[i, token]) for i, token in enumerate(text[n:])))
        return totals

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-likelihood, is greedy) of each continuation after its context."""
        results = []
        for request in requests:
            context, target = (decode_ids(part) for part in request.args)
            logprobs = self._force([context], [target[:-1]])[0]
            total = sum(float(logprobs[i, token]) for i, token in enumerate(target))
            results.append((total, logprobs.argmax(-1).tolist() == list(target)))
        return results

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the answerer says to all prompts, in their order."""
        if self._answer_all is None:
            raise AssertionError("this model was opened to score texts, and nobody answers for it")
        return list(self._answer_all([str(request.args[0]) for request in requests]))

    def _force(self, prompts: list[tuple[int, ...]], rest: list[tuple[int, ...]]) -> list[Any]:
        if self._session is None:
            raise AssertionError("this model answers prompts, and has no session to score texts with")
        return list(force(self._session, prompts, rest))


def run_task(
    model: FasttrackLM,
    name: str,
    documents: Sequence[dict[str, str]],
    *,
    is_rolling: bool,
    max_tokens: int,
    folder: Path,
) -> None:
    """Run one embedded task through lm-eval's evaluator; raw observations stay in `model`.

    `documents` hold `text` (rolling) or `prompt` and `target`; they go through a local JSON file under
    `folder`, lm-eval's own loading path, and never touch a network.
    """
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.evaluator import evaluate

    config: dict[str, Any] = {"task": name, "metadata": {"version": 1}, **_local(folder, name, documents)}
    if is_rolling:
        config |= {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [
                {"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}
            ],
        }
    else:
        config |= {
            "output_type": "generate_until",
            "doc_to_text": "{{prompt}}",
            "doc_to_target": "{{target}}",
            "generation_kwargs": {"until": [], "max_gen_toks": max_tokens, "do_sample": False},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        }
    evaluate(model, {name: ConfigurableTask(config=config)}, bootstrap_iters=0, log_samples=False)


def run_yaml_task(
    model: FasttrackLM, file: Path, documents: Sequence[dict[str, str]], folder: Path
) -> Callable[[dict[str, str], str], float]:
    """Run a task that a YAML file defines, over these documents; gives the task's own score of an answer.

    The documents take the place of the file's data set and go through a local JSON file under `folder`.
    """
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks._yaml_loader import load_yaml  # the only reader of `!function`; lm-eval is pinned

    config: dict[str, Any] = load_yaml(file)
    name, metric = str(config["task"]), str(config["metric_list"][0]["metric"])
    for split in ("training_split", "fewshot_split"):
        config.pop(split, None)
    config |= _local(folder, name, documents)
    task = ConfigurableTask(config=config)
    evaluate(model, {name: task}, bootstrap_iters=0, log_samples=False)

    def score(document: dict[str, str], answer: str) -> float:
        return float(task.process_results(document, [answer])[metric])

    return score


def task_file(name: str) -> Path:
    """The YAML file of one of lm-eval's own tasks, such as `aime/aime25`."""
    import lm_eval

    return Path(str(lm_eval.__file__)).parent / "tasks" / f"{name}.yaml"


def _local(folder: Path, name: str, documents: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Settings of a task whose documents lie in a local file, which is written here."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    return {
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(source)}, "cache_dir": str(folder / "datasets")},
        "test_split": "test",
    }
