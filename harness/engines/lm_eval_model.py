"""A pack's model as lm-eval sees it: registered as `fasttrack`, driven in this process, one arm an instance.

Texts are token ids in decimal, joined by spaces: the embedded tasks have no tokenizer, and a task over real
text encodes it before it gets here. Log-probabilities along every scored text are kept in `forced`, answers
in `answers`, so that the stage has the raw observations and not lm-eval's aggregates.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from harness.domain.pack import Session
from harness.engines.in_process import answer, force

__all__ = ["FasttrackLM", "decode_ids", "encode_ids", "run_task"]


def encode_ids(tokens: Sequence[int]) -> str:
    """Token ids as text."""
    return " ".join(map(str, tokens))


def decode_ids(text: str) -> tuple[int, ...]:
    """Text of `encode_ids` as token ids; raises `ValueError` on anything else."""
    return tuple(int(word) for word in text.split())


@register_model("fasttrack")
class FasttrackLM(LM):  # type: ignore[misc]  # lm-eval ships no types
    """One open session.

    `prompt_tokens` of each scored text go in by prefill, the rest is forced token by token.
    """

    def __init__(self, session: Session, batch: int, stop: int = -1, prompt_tokens: int = 1) -> None:
        super().__init__()
        self._session, self._batch, self._stop, self._prompt_tokens = session, batch, stop, prompt_tokens
        self.forced: dict[str, Any] = {}
        """[positions, vocab] log-probabilities by text."""
        self.answers: dict[str, Any] = {}
        """`Generation` by prompt text."""

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each text after its first `prompt_tokens`; texts of a batch have one length."""
        texts = [decode_ids(request.args[0]) for request in requests]
        totals: list[float] = []
        for start in range(0, len(texts), self._batch):
            part = texts[start : start + self._batch]
            n = self._prompt_tokens
            rows = force(self._session, [t[:n] for t in part], [t[n:-1] for t in part])
            for text, logprobs in zip(part, rows, strict=True):
                self.forced[encode_ids(text)] = logprobs
                totals.append(sum(float(logprobs[i, token]) for i, token in enumerate(text[n:])))
        return totals

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-likelihood, is greedy) of each continuation after its context."""
        results = []
        for request in requests:
            context, target = (decode_ids(part) for part in request.args)
            logprobs = force(self._session, [context], [target[:-1]])[0]
            total = sum(float(logprobs[i, token]) for i, token in enumerate(target))
            results.append((total, logprobs.argmax(-1).tolist() == list(target)))
        return results

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers, stop token included; `max_gen_toks` comes from each request."""
        items = [
            (request.args[0], decode_ids(request.args[0]), int(request.args[1]["max_gen_toks"]))
            for request in requests
        ]
        found = answer(self._session, items, self._stop, self._batch)
        self.answers.update({generation.item: generation for generation in found})
        return [encode_ids(generation.tokens) for generation in found]


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

    folder.mkdir(parents=True, exist_ok=True)
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    config: dict[str, Any] = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(source)}, "cache_dir": str(folder / "datasets")},
        "test_split": "test",
        "metadata": {"version": 1},
    }
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
