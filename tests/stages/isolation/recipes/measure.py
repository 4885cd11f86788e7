"""Recall and false alarms of the fast track's isolation rules on labelled changes of a scratch repository.

Run by hand: `python tests/stages/isolation/recipes/measure.py SCRATCH [--json]`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from harness.documents import load_policy_set, parse_yaml
from harness.domain.claim import Architecture, Claim, Envelope, Range, Switch
from harness.domain.machine import Machine
from harness.domain.pack import Pack
from harness.repository import Limits, load_change
from harness.stages.isolation.replay import ReplayedChange, Ruleset, Setting, replay_change

RECIPES = Path(__file__).with_name("recipes.yaml")
SETTING = Setting(
    pack=cast(Pack, SimpleNamespace(repository_prefix="")),
    claim=Claim(
        name="k3", pack="k3", summary="text",
        envelope=Envelope(
            architectures=(Architecture(arch="cpu", level="dispatched"),), tp=(1,), dcp=(1,),
            batch=Range(min=1, max=1), batch_buckets=(1,), context=Range(min=1, max=8),
            drafts=Range(min=0, max=0), kv_dtypes=("bf16",), phases=("decode",), max_rows_per_step=1,
        ),
        switch=Switch(name="decode_backend", on="latency_specialized", off="auto", default="auto"),
        features=(
            "full_context", "temperature_sampling", "structured_output", "prefix_caching",
            "speculative_decoding",
        ),
        state=(), files=("vllm/models/kimi_k3/**", "csrc/kimi_k3/**"),
    ),
    machine=Machine(platform="x", cpu_model="x", cpu_count=1, memory_bytes=1, python="3.11"),
    today=date(2026, 11, 29),
)  # fmt: skip


class Result(NamedTuple):
    """One recipe and what the rules said."""

    id: str
    label: str
    is_right: bool
    told: tuple[str, ...]


def main() -> int:
    """Measure every recipe; 1 when a reach was missed or a clean change was stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rules = Ruleset(*load_policy_set("fast_track"))
    results = [_measure(asked.scratch, recipe, rules) for recipe in load_recipes()]
    if asked.json:
        print(json.dumps([result._asdict() for result in results]))
        return 0
    for result in results:
        word = "ok" if result.is_right else "WRONG"
        print(f"{word:<5} {result.label:<12} {result.id:<34} {', '.join(result.told)}")
    for label, total in Counter(result.label for result in results).items():
        right = sum(result.is_right for result in results if result.label == label)
        print(f"{label}: {right} of {total} as labelled")
    return 0 if all(result.is_right for result in results) else 1


def load_recipes() -> list[dict[str, Any]]:
    """The recipes as they are written."""
    data = parse_yaml(RECIPES.read_bytes(), str(RECIPES))
    assert isinstance(data, dict)
    return cast(list[dict[str, Any]], data["recipes"])


def _measure(scratch: Path, recipe: dict[str, Any], rules: Ruleset) -> Result:
    base, head = f"v{recipe['base']}", _commit(scratch, recipe)
    change, tree = load_change(scratch, base, head, Limits(max_changed_files=20_000))
    with tree:
        replayed = replay_change(change, tree, rules, None, SETTING)
    assert change.files, f"recipe {recipe['id']} changes nothing"
    return Result(recipe["id"], recipe["label"], _is_right(recipe, replayed), _told(replayed))


def _is_right(recipe: dict[str, Any], replayed: ReplayedChange) -> bool:
    failed = {check.partition("/")[2] for check, status in replayed.new if status == "FAIL"}
    others = {status for _, status in replayed.new} - {"PASS", "FAIL"}
    if others:
        return False
    if recipe["label"] == "clean":
        return not failed
    if recipe["label"] != "reach":
        return "zones" in failed
    at = recipe.get("at")
    return bool(failed - {"zones"}) and (
        at is None or any(path == at for rule, path, _ in replayed.findings if rule != "zone_breach")
    )


def _told(replayed: ReplayedChange) -> tuple[str, ...]:
    counted = Counter(rule for rule, _, _ in replayed.findings)
    return tuple(f"{rule} x{count}" if count > 1 else rule for rule, count in sorted(counted.items()))


def _commit(scratch: Path, recipe: dict[str, Any]) -> str:
    """A commit on top of the base with the recipe's paths as they are at head, and its lines planted."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ, "GIT_INDEX_FILE": f"{folder}/index", "GIT_AUTHOR_NAME": "a",
            "GIT_AUTHOR_EMAIL": "a@a", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@a",
        }  # fmt: skip

        def git(*arguments: str, given: str | None = None) -> str:
            done = subprocess.run(
                ["git", "-C", str(scratch), *arguments], env=environment, input=given, text=True,
                capture_output=True, check=True,
            )  # fmt: skip
            return done.stdout

        base, head = f"v{recipe['base']}", f"v{recipe['head']}"
        git("read-tree", base)
        gone = git("ls-files", "-z", "--", *recipe["paths"]).split("\0")[:-1]
        if gone:
            git("update-index", "--force-remove", "-z", "--stdin", given="\0".join(gone) + "\0")
        git(
            "update-index",
            "-z",
            "--index-info",
            given=git("ls-tree", "-r", "-z", head, "--", *recipe["paths"]),
        )
        if recipe.get("plant"):
            text = git("show", f"{head}:{recipe['at']}") + "\n\n" + recipe["plant"]
            blob = git("hash-object", "-w", "--stdin", given=text).strip()
            git("update-index", "--add", "--cacheinfo", f"100644,{blob},{recipe['at']}")
        return git("commit-tree", git("write-tree").strip(), "-p", base, "-m", recipe["id"]).strip()


if __name__ == "__main__":
    sys.exit(main())
