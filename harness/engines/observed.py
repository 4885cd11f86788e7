"""What the observer in a server wrote down, as the evals need it: steps by kind, and each token's step.

A server of whole-server settings (another backend, another graph mode) has no dispatcher of its own: there a
step counts as optimised where the observer saw chosen what the settings say must be chosen.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.domain.cell_tokens import context_power
from harness.engines.serving import Reply, StepTotal

__all__ = ["StepBook"]

Fact = tuple[str, str]


class StepBook:
    """One server's observations, read as they grow. A torn last line is read again when it is whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place = 0
        self._steps: list[dict[str, Any]] = []
        self._by_request: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._selected: dict[str, Any] = {}
        self._plans: Counter[tuple[int, bool, str]] = Counter()
        self._header: dict[str, Any] = {}

    def is_observed(self) -> bool:
        """Whether an observer is at work in the server."""
        self._read()
        return bool(self._header.get("is_on"))

    def mark(self) -> int:
        """Steps so far."""
        self._read()
        return len(self._steps)

    def totals(self, observed: Sequence[Fact] = (), since: int = 0) -> dict[StepTotal, int]:
        """Tokens by kind of step, since a mark."""
        self._read()
        chosen = self._chosen(observed)
        total: dict[StepTotal, int] = {}
        for step in self._steps[since:]:
            path, reason = (str(step["path"]), str(step["reason"])) if chosen is None else chosen
            phase, context = str(step["phase"]), context_power(int(step.get("context", 0)))
            drafts = int(step.get("drafts", 0)) if phase == "verify" else 0
            kind = StepTotal(phase, path, reason, int(step["requests"]), context, drafts)
            total[kind] = total.get(kind, 0) + int(step["tokens"])
        return total

    def with_steps(self, reply: Reply, request: str) -> Reply:
        """The reply with the step of each token: the first comes from the prompt's last step, each later one
        from a decode step of the request's."""
        self._read()
        names = [name for name in self._by_request if request and _is_of(name, request)]
        steps = self._by_request[names[0]] if len(names) == 1 else []
        later = [step for step in steps if names[0] not in step["prompts"]]
        count = len(reply.tokens)
        if not count or len(later) < count - 1 or any(s["phase"] == "verify" for s in steps):
            return reply
        told = later[: count - 1]
        return reply.model_copy(
            update={
                "steps": (None, *(int(s["step"]) for s in told)),
                "paths": ("", *(f"{s['path']}/{s['reason']}" for s in told)),
            }
        )

    def facts(self) -> list[Fact]:
        """What was selected, and what a specialised decode planned, for people and bundles."""
        self._read()
        if not self._header.get("is_on"):
            why = self._header.get("why") or "no observer was loaded in the server"
            return [("observer", f"off: {why}")]
        selected = {
            f"observed.{name}": _text(value) for name, value in self._selected.items() if name != "kind"
        }
        plans = [
            f"{rows} rows {'taken' if is_taken else reason}"
            for (rows, is_taken, reason), _ in sorted(self._plans.items())
        ]
        return [
            ("observer", f"on, vLLM {self._header.get('vllm')}"),
            *sorted(selected.items()),
            *([("observed.plans", "; ".join(plans))] if plans else []),
        ]

    def _chosen(self, observed: Sequence[Fact]) -> tuple[str, str] | None:
        """Path and reason of every step where a whole-server setting is what is compared; None elsewhere."""
        if not observed:
            return None
        seen = {name: _text(value) for name, value in self._selected.items()}
        missing = [name for name, value in observed if value not in _values(seen.get(name, ""))]
        return ("optimised", "selected") if not missing else ("stock", f"not_selected_{'_'.join(missing)}")

    def _read(self) -> None:
        try:
            with self.path.open("rb") as file:
                file.seek(self._place)
                text = file.read()
        except OSError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._place += len(whole)
        for line in whole.decode("utf-8", "replace").splitlines():
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError):
                continue

    def _take(self, entry: dict[str, Any]) -> None:
        kind = entry["kind"]
        if kind == "observer":
            if not self._header.get("is_on"):
                self._header = entry
        elif kind == "selected":
            self._selected = entry
        elif kind == "plan":
            self._plans[int(entry["rows"]), bool(entry["is_taken"]), str(entry["reason"])] += 1
        elif kind == "step":
            self._steps.append(entry)
            for name in entry["ids"]:
                self._by_request[str(name)].append(entry)


def _is_of(name: str, request: str) -> bool:
    """Whether the engine's name of a request is the one that the answer carried: it appends a number, and a
    few letters of its own."""
    return name == request or name.startswith(f"{request}-")


def _text(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, Mapping):
        return "; ".join(f"{name}={_text(inner)}" for name, inner in value.items())
    return str(value)


def _values(text: str) -> tuple[str, ...]:
    return (text, *text.split(","))
