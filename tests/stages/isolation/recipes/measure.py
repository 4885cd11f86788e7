"""Recall and precision of the fast track's isolation rules on labelled changes of a scratch repository.

Run by hand: `python tests/stages/isolation/recipes/measure.py SCRATCH [--set held_out] [--json]`. SCRATCH is
what `releases.py` makes.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, cast

from harness.documents import load_policy_set, parse_yaml
from harness.domain.claim import Architecture, Claim, Envelope, Range, Switch
from harness.domain.machine import Machine
from harness.domain.pack import Pack
from harness.domain.policy import ZoneMap
from harness.repository import Limits, load_change
from harness.stages.isolation.replay import ReplayedChange, Ruleset, Setting, replay_change

HERE: Final = Path(__file__).parent
SETS: Final = {
    "tuned": "recipes.yaml",
    "held_out": "held_out.yaml",
    "second": "held_out_second.yaml",
    "third": "held_out_third.yaml",
    "fourth": "held_out_fourth.yaml",
    "fifth": "held_out_fifth.yaml",
}
OPEN_LABELS: Final = ("open", "dependency", "other_model")
CLAIM: Final = Claim(
    name="k3", pack="k3", summary="text",
    envelope=Envelope(
        architectures=(Architecture(arch="cpu", level="dispatched"),), tp=(1,), dcp=(1,),
        batch=Range(min=1, max=1), batch_buckets=(1,), context=Range(min=1, max=8),
        drafts=Range(min=0, max=0), kv_dtypes=("bf16",), phases=("decode",), max_rows_per_step=1,
    ),
    switch=Switch(name="decode_backend", on="latency_specialized", off="auto", default="auto"),
    features=(
        "full_context", "temperature_sampling", "structured_output", "prefix_caching", "speculative_decoding",
    ),
    state=(), files=("vllm/models/kimi_k3/**", "csrc/kimi_k3/**"),
)  # fmt: skip
CONFIGURATIONS: Final = {"glm5next": "glm5_next"}
"""How a model's own configuration class is called where not as its folder."""
MACHINE: Final = Machine(platform="x", cpu_model="x", cpu_count=1, memory_bytes=1, python="3.11")


class Made(NamedTuple):
    """A commit, and where its plant lies in the planted file."""

    commit: str
    first: int = 0
    last: int = 10**9


class Result(NamedTuple):
    """One recipe and what the rules said."""

    id: str
    label: str
    kind: str
    is_right: bool
    told: tuple[str, ...]
    files: int
    duration_s: float


def main() -> int:
    """Measure every recipe; 1 when a reach was missed or a clean change was stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--set", choices=tuple(SETS), default="tuned", dest="chosen")
    parser.add_argument("--only", default="", help="regular expression for recipes' ids")
    parser.add_argument("--whole", action="store_true", help="judge plants with the whole cut around them")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rules = judging_rules()
    wanted = [r for r in load_recipes(asked.chosen) if re.search(asked.only, r["id"])]
    results = []
    for recipe in wanted:
        alone = {"paths": [recipe["at"]]} if recipe["label"] == "reach" and recipe.get("plant") else {}
        results.append(measure(asked.scratch, recipe if asked.whole else {**recipe, **alone}, rules))
        print(results[-1].id, results[-1].is_right, results[-1].told, file=sys.stderr, flush=True)
    if asked.json:
        print(json.dumps([result._asdict() for result in results]))
        return 0
    for result in results:
        word = "ok" if result.is_right else "WRONG"
        print(f"{word:<5} {result.label:<12} {result.id:<34} {', '.join(result.told)}")
    print("\n".join(by_label(results)))
    print("\n".join(by_kind(results)))
    return 0 if all(result.is_right for result in results) else 1


def judging_rules() -> Ruleset:
    """The fast track's own, but for the family that measures the import graph and stops none of these
    changes.
    """
    rules = Ruleset(*load_policy_set("fast_track"))
    families = tuple(family for family in rules.policy.rule_families if family != "blast_radius")
    update = {"rule_families": families, "outside_pack_families": families}
    return rules._replace(policy=rules.policy.model_copy(update=update))


def load_recipes(chosen: str = "tuned") -> list[dict[str, Any]]:
    """The recipes as they are written, each with what its cut says."""
    name = SETS[chosen]
    data = parse_yaml((HERE / name).read_bytes(), name)
    assert isinstance(data, dict)
    cuts = cast(dict[str, dict[str, Any]], data.get("cuts", {}))
    listed = cast(list[dict[str, Any]], data["recipes"])
    return [{"model": "kimi_k3", "kind": r["label"], **cuts.get(r.get("cut", ""), {}), **r} for r in listed]


def measure(scratch: Path, recipe: dict[str, Any], rules: Ruleset) -> Result:
    """What the rules say of one recipe."""
    made = make_commit(scratch, recipe)
    base = f"v{recipe['base']}"
    change, tree = load_change(scratch, base, made.commit, Limits(max_changed_files=20_000))
    with tree:
        begun = os.times().user
        replayed = replay_change(change, tree, *_judged_as(recipe["model"], rules))
        duration = os.times().user - begun
    assert change.files, f"recipe {recipe['id']} changes nothing"
    told = _told(replayed)
    return Result(
        recipe["id"], recipe["label"], recipe["kind"], _is_right(recipe, replayed, made), told,
        len(change.files), round(duration, 2),
    )  # fmt: skip


def by_label(results: Sequence[Result]) -> Iterator[str]:
    """How many of each label came out as labelled."""
    for label, total in Counter(result.label for result in results).items():
        right = sum(result.is_right for result in results if result.label == label)
        yield f"{label}: {right} of {total} as labelled"


def by_kind(results: Sequence[Result]) -> Iterator[str]:
    """Recall and precision of each kind: a false alarm is a clean change stopped by a rule that caught it."""
    alarms = Counter(rule.partition(" x")[0] for r in results if r.label == "clean" for rule in r.told)
    kinds: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        if result.label != "clean":
            kinds[result.kind].append(result)
    yield "| kind | changes | caught | recall | precision |"
    yield "|---|---|---|---|---|"
    for kind, members in kinds.items():
        caught = [r for r in members if r.is_right]
        rules = {rule.partition(" x")[0] for r in caught for rule in r.told}
        false = sum(alarms[rule] for rule in rules)
        precision = f"{len(caught) / (len(caught) + false):.2f}" if caught else "-"
        recall = len(caught) / len(members)
        yield f"| {kind} | {len(members)} | {len(caught)} | {recall:.2f} | {precision} |"


def _judged_as(model: str, rules: Ruleset) -> tuple[Ruleset, None, Setting]:
    """The rules with that model's folder as the model code, and a claim for it."""
    configuration = CONFIGURATIONS.get(model, model)
    files = (
        f"/vllm/transformers_utils/configs/*{configuration}*.py",
        f"/vllm/models/{model}/**",
        f"/csrc/**/*{model}*",
        f"/csrc/*{model}*",
        f"/csrc/**/{model}/**",
    )
    zones = rules.zones
    if model != "kimi_k3":
        zones = ZoneMap(
            name=zones.name,
            repository=zones.repository,
            zones=tuple(
                z.model_copy(update={"globs": files}) if z.name == "model_code" else z for z in zones.zones
            ),
        )
    claim = CLAIM.model_copy(update={"files": files})
    pack = cast(Pack, SimpleNamespace(repository_prefix=""))
    setting = Setting(pack=pack, claim=claim, machine=MACHINE, today=date(2026, 11, 29))
    return rules._replace(zones=zones), None, setting


def _is_right(recipe: dict[str, Any], replayed: ReplayedChange, made: Made) -> bool:
    """A planted reach counts where a finding lies on a planted line, or on the file as a whole."""
    failed = {check.partition("/")[2] for check, status in replayed.new if status == "FAIL"}
    others = {status for _, status in replayed.new} - {"PASS", "FAIL"}
    if others:
        return False
    if recipe["label"] == "clean":
        return not failed
    if recipe["label"] in OPEN_LABELS:
        return "zones" in failed
    at = recipe.get("at") or recipe.get("edit", {}).get("path")
    return bool(failed - {"zones"}) and (
        at is None
        or any(
            path == at and (line is None or made.first <= line <= made.last)
            for rule, path, line in replayed.findings
            if rule != "zone_breach"
        )
    )


def _told(replayed: ReplayedChange) -> tuple[str, ...]:
    counted = Counter(rule for rule, _, _ in replayed.findings)
    return tuple(f"{rule} x{count}" if count > 1 else rule for rule, count in sorted(counted.items()))


def make_commit(scratch: Path, recipe: dict[str, Any]) -> Made:
    """A commit on top of the base with the recipe's paths as they are at head, and its lines planted."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ, "GIT_INDEX_FILE": f"{folder}/index", "GIT_WORK_TREE": folder,
            "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@a", "GIT_COMMITTER_NAME": "a",
            "GIT_COMMITTER_EMAIL": "a@a",
        }  # fmt: skip

        def git(*arguments: str, given: str | None = None, is_checked: bool = True) -> str:
            done = subprocess.run(
                ["git", "-C", str(scratch), *arguments], env=environment, input=given, text=True,
                capture_output=True, check=is_checked,
            )  # fmt: skip
            return done.stdout

        def put(path: str, text: str) -> None:
            blob = git("hash-object", "-w", "--stdin", given=text).strip()
            git("update-index", "--add", "--cacheinfo", f"100644,{blob},{path}")

        base, head = f"v{recipe['base']}", f"v{recipe['head']}"
        git("read-tree", base)
        gone = git("ls-files", "-z", "--", *recipe["paths"]).split("\0")[:-1]
        if gone:
            git("update-index", "--force-remove", "-z", "--stdin", given="\0".join(gone) + "\0")
        listed = git("ls-tree", "-r", "-z", head, "--", *recipe["paths"])
        git("update-index", "-z", "--index-info", given=listed)
        first, last = 0, 10**9
        if recipe.get("plant"):
            own = any(recipe["at"].startswith(path) for path in recipe["paths"])
            side = head if own else base
            text, first = _planted(git("show", f"{side}:{recipe['at']}", is_checked=False), recipe)
            last = first + str(recipe["plant"]).count("\n")
            put(recipe["at"], text)
        if edit := recipe.get("edit"):
            own = any(edit["path"].startswith(path) for path in recipe["paths"])
            text = git("show", f"{head if own else base}:{edit['path']}")
            edited, count = re.subn(edit["find"], edit["put"], text, count=1, flags=re.MULTILINE)
            assert count == 1, f"recipe {recipe['id']}: {edit['find']!r} is nowhere in {edit['path']}"
            put(edit["path"], edited)
        commit = git("commit-tree", git("write-tree").strip(), "-p", base, "-m", recipe["id"]).strip()
        return Made(commit, first, last)


def _planted(text: str, recipe: dict[str, Any]) -> tuple[str, int]:
    """The file with its plant at the end, or after the line that `after` finds, and the plant's line."""
    plant = str(recipe["plant"])
    if not text or "after" not in recipe:
        return (f"{text}\n\n{plant}", text.count("\n") + 3) if text else (plant, 1)
    lines = text.split("\n")
    found = next((n for n, line in enumerate(lines) if re.search(recipe["after"], line)), None)
    assert found is not None, f"recipe {recipe['id']}: {recipe['after']!r} is nowhere in {recipe['at']}"
    return "\n".join([*lines[: found + 1], plant.rstrip("\n"), *lines[found + 1 :]]), found + 2


if __name__ == "__main__":
    sys.exit(main())
