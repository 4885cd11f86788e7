"""A small repository with a pack, a claim and a policy, and the stage run over its last commit."""

import os
import subprocess
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.documents import load_rules
from harness.domain.check import Outcome
from harness.domain.claim import Architecture, Claim, Envelope, Range, Switch
from harness.domain.machine import Machine, Tier
from harness.domain.pack import Pack
from harness.domain.policy import Policy, Rule, Zone, ZoneMap
from harness.domain.stage import PlanRequest, StageContext
from harness.repository import load_change
from harness.stages.isolation.judging import judge
from harness.stages.isolation.planning import plan
from harness.stages.isolation.sampling import sample_on

__all__ = ["Bench"]

TODAY = date(2026, 11, 29)
ZONES = ZoneMap(
    name="bench",
    repository="bench",
    zones=(
        Zone(name="policy", globs=("/policies/**",), why="text"),
        Zone(name="tests", globs=("/tests/**",), why="text"),
        Zone(name="docs", globs=("*.md",), why="text"),
        Zone(name="model_code", globs=("/models/k3/**",), why="text"),
        Zone(name="shared_core", globs=("/engine/**",), why="text"),
    ),
)
POLICY = Policy.model_validate(
    {
        "name": "bench",
        "summary": "text",
        "zone_map": "bench",
        "proofs": ({"stage": "isolation"},),
        "outside_pack_families": ("reach", "hygiene"),
    }
)
CLAIM = Claim(
    name="k3",
    pack="k3",
    summary="text",
    envelope=Envelope(
        architectures=(Architecture(arch="cpu", level="dispatched"),),
        tp=(1,),
        dcp=(1,),
        batch=Range(min=1, max=1),
        batch_buckets=(1,),
        context=Range(min=1, max=8),
        drafts=Range(min=0, max=0),
        kv_dtypes=("bf16",),
        phases=("decode",),
        max_rows_per_step=1,
    ),
    switch=Switch(name="decode_backend", on="fast", off="auto", default="auto"),
    features=("full_context", "temperature_sampling"),
    state=(),
    files=("models/k3/**", "tests/k3/**"),
)
MACHINE = Machine(platform="x", cpu_model="x", cpu_count=1, memory_bytes=1, python="3.11")
START: dict[str, str] = {
    "engine/core.py": "class Scheduler:\n    limit = 4\n\n    def schedule(self): ...\n",
    "models/k3/step.py": "rows = 1\n",
    "tests/k3/test_step.py": "def test_step():\n    assert 1 == 1\n",
    "README.md": "text\n",
}


class Bench:
    """Commits files and judges the last commit."""

    def __init__(self, root: Path, rules: Sequence[Rule]) -> None:
        self.root = root
        self.rules = tuple(rules)
        self.policy = POLICY
        self.claim = CLAIM
        root.mkdir()
        self.git("init", "-q", "-b", "main")
        self.commit(START)

    def git(self, *arguments: str) -> None:
        environment = {
            "PATH": os.environ["PATH"], "HOME": str(self.root), "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@a", "GIT_COMMITTER_NAME": "a",
            "GIT_COMMITTER_EMAIL": "a@a",
        }  # fmt: skip
        subprocess.run(["git", *arguments], cwd=self.root, env=environment, check=True, capture_output=True)

    def commit(self, files: dict[str, str] | dict[str, str | None] | dict[str, str | bytes | None]) -> None:
        for name, content in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                path.unlink()
            else:
                path.write_bytes(content.encode() if isinstance(content, str) else content)
        self.git("add", "-A", "-f", ".")
        self.git("commit", "-q", "--allow-empty", "-m", "m")

    def judge(self, base: str = "HEAD~1", today: date = TODAY) -> dict[str, Outcome]:
        """Outcomes of the last commit by family."""
        change, tree = load_change(self.root, base, "HEAD")
        pack = cast(Pack, SimpleNamespace(repository_prefix="models/k3/"))
        request = PlanRequest(
            pack=pack, claim=self.claim, policy=self.policy, zones=ZONES, rules=self.rules, change=change,
            machine=MACHINE, tier=Tier.SMOKE, is_full=False, seed=0,
        )  # fmt: skip
        here = Path("/nonexistent")
        context = StageContext(
            pack=pack, claim=self.claim, policy=self.policy, zones=ZONES, rules=self.rules, change=change,
            machine=MACHINE, tier=Tier.SMOKE, tree=tree, cache=here, logs=here, ledger=here,
            progress=lambda text: None,
        )  # fmt: skip
        self.context: Any = context
        with tree:
            return {str(c.subject): judge(c, sample_on(c, context, today)) for c in plan(request)}


@pytest.fixture(scope="session")
def rules() -> tuple[Rule, ...]:
    return load_rules()


@pytest.fixture
def bench(tmp_path: Path, rules: tuple[Rule, ...]) -> Bench:
    return Bench(tmp_path / "repo", rules)
