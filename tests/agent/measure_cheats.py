"""Every cheat of `tests/faults/cheats` handed in to `optimize` by a scripted agent, and what came of each.

Run by hand, as it takes minutes: `python -m tests.agent.measure_cheats --write`; a test holds the record
against the cheats that there are, and tries one of each op itself.
"""

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from harness.agent.judge import Judge, Settings
from harness.agent.loop import Budgets, optimize
from harness.engines.packs import load_pack
from tests.agent.loops import CHEATS, ROOT, cheating, op_of, policy_file, slow_repository

__all__ = ["RECORD", "Tried", "names", "tried"]

RECORD: Final = Path(__file__).with_name("cheats.json")
AGENT: Final = ROOT / "tests/agent/agents/cheat.py"


class Tried(NamedTuple):
    """What one cheat came to."""

    cheat: str
    op: str
    accepted: bool
    stage: str
    words: str


def names() -> tuple[str, ...]:
    """Every cheat, in order."""
    return tuple(sorted(f.stem for f in CHEATS.glob("*.py") if f.stem != "__init__"))


def tried(cheats: Iterable[str], folder: Path) -> tuple[Tried, ...]:
    """One loop for each op, one attempt for each cheat; raises `AssertionError` where a loop harmed what it
    began with, or proved anything.
    """
    by_op: dict[str, list[str]] = defaultdict(list)
    for name in cheats:
        by_op[op_of(name)].append(name)
    repo = slow_repository(folder / "repo")
    return tuple(row for op, own in by_op.items() for row in _loop(op, own, repo, folder))


def _loop(op: str, own: list[str], repo: Path, folder: Path) -> Iterable[Tried]:
    place = folder / op
    handed_in = place / "candidates"
    handed_in.mkdir(parents=True)
    for name in own:
        (handed_in / f"{name}.py").write_text(cheating(name), encoding="utf-8")
    settings = Settings(
        pack=load_pack("k3_decode"), repo=repo, policy=str(policy_file(folder / "policies", op)),
        folder=place / "judge", workspace=place / "workspace", attempts=len(own), cell="b8.",
    )  # fmt: skip
    judge = Judge.of(settings, op)
    judge.checks = (judge.timed_check,)  # one cell of several: the rest take as long and say the same
    command = f"{sys.executable} {AGENT} {handed_in}"
    result = optimize(judge, command, Budgets(plateau=99), place / "out", {}, lambda _text: None)
    assert (result.ended, result.attempts, result.best) == ("attempts", len(own), None), result.words
    assert all((place / "out/best" / name).read_text() == text for name, text in judge.start.items())
    for entry in judge.entries():
        if entry.result is not None:
            found = entry.result
            yield Tried(entry.question, op, found.accepted, found.stage, found.words)


def main() -> int:
    """Try every cheat; with --write the record is written anew. 1 where one was accepted."""
    with tempfile.TemporaryDirectory(prefix="fasttrack-cheats-") as folder:
        found = tried(names(), Path(folder))
    text = json.dumps([row._asdict() for row in found], indent=1) + "\n"
    sys.stdout.write(text)
    if "--write" in sys.argv[1:]:
        RECORD.write_text(text, encoding="utf-8")
    return int(any(row.accepted for row in found))


if __name__ == "__main__":
    sys.exit(main())
