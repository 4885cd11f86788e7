"""Two builds: base and head must differ in what the diff touches, and in nothing else."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from harness.domain.change import Change, ChangedFile, FileKind
from harness.domain.check import Check, Outcome, Samples, SampleTable, Status
from harness.domain.machine import Tier
from harness.repository import Limits, load_change
from harness.stages.coverage import judge, plan, sample
from harness.stages.coverage.build_child import code_digest
from tests.fakes.pack import FakePack
from tests.fakes.requests import plan_request, stage_context

A1, A2 = {"a.py": "1"}, {"a.py": "2"}
SOURCE = 'def f(x):\n    """Says."""\n    return x + LIMIT\n\n\nLIMIT = 3\n'


def changed(*paths: str, status: str = "modified") -> Change:
    """A change of these files."""
    files = [{"path": path, "status": status, "kind": FileKind.TEXT} for path in paths]
    return Change(
        repository="test", base="0" * 40, head="1" * 40, files=tuple(map(ChangedFile.model_validate, files))
    )


def planned(change: Change) -> Check | None:
    request = replace(plan_request(), change=change)
    return next((c for c in plan(request) if c.id == "coverage/rebuild/base_and_head"), None)


def judged(
    base: dict[str, str],
    head: dict[str, str],
    touched: tuple[str, ...],
    *,
    is_own: bool = True,
    launches: int = 7,
) -> Outcome:
    """The outcome of two builds by the digests of their files, all of them loaded as modules."""
    check = planned(changed("tests/fakes/pack.py"))
    assert check is not None
    loaded = [
        (side, kind, name, digest)
        for side, files in (("base", base), ("head", head))
        for kind in ("files", "modules")
        for name, digest in files.items()
    ]
    tables = (
        SampleTable(
            name="two_builds", columns=("build", "is_own", "launches"),
            rows=(("base", True, launches), ("head", is_own, launches)),
        ),
        SampleTable(name="loaded", columns=("build", "kind", "name", "digest"), rows=tuple(loaded)),
        SampleTable(name="touched", columns=("name",), rows=tuple((name,) for name in touched)),
    )  # fmt: skip
    return judge(check, Samples(check=check.id, tier=Tier.SMOKE, tables=tables))


def test_builds_are_compared_where_a_change_touches_a_pack_that_was_there_before() -> None:
    check = planned(changed("tests/fakes/pack.py", "README.md"))

    assert check is not None
    assert check.parameter("touched") == "tests/fakes/pack.py"
    assert planned(changed("README.md")) is None
    assert planned(changed("tests/fakes/claim.yaml", "tests/fakes/pack.py", status="added")) is None


def test_builds_that_differ_in_what_the_diff_touches_pass_and_a_build_in_its_own_place_is_noticed() -> None:
    outcome = judged({"a.py": "1", "b.py": "1"}, {"a.py": "2", "b.py": "1"}, ("a.py",))

    assert outcome.status is Status.PASS
    assert outcome.control is not None
    assert outcome.control.observed == "the diff touches a.py, and both builds hold the same there"


@pytest.mark.parametrize(
    ("base", "head", "fields", "words"),
    [
        (A1, A1, {}, "both builds hold the same there"),
        (A1 | {"b.py": "1"}, A2 | {"b.py": "2"}, {}, "b.py, which the diff does not touch"),
        (A1, A2 | {"c.py": "1"}, {}, "c.py, which the diff does not touch"),
        (A1, A2, {"is_own": False}, "the pack of head was loaded from elsewhere"),
        (A1, A2, {"launches": 0}, "the build of base launched no optimised op"),
    ],
    ids=["one build twice", "more than the diff", "a file of no diff", "installed pack", "path not taken"],
)
def test_builds_that_are_not_base_and_head_of_the_diff_are_invalid(
    base: dict[str, str], head: dict[str, str], fields: dict[str, Any], words: str
) -> None:
    outcome = judged(base, head, ("a.py",), **fields)

    assert outcome.status is Status.INVALID
    assert words in outcome.summary


def test_without_a_repository_there_is_no_evidence(tmp_path: Path) -> None:
    check = planned(changed("tests/fakes/pack.py"))
    assert check is not None

    outcome = judge(check, sample(check, stage_context(FakePack(), tmp_path)))

    assert outcome.status is Status.NO_EVIDENCE
    assert outcome.summary == "without a repository there are no two builds"


@pytest.mark.parametrize(
    ("text", "is_same"),
    [
        ('def f(x):\n    """Says more."""\n\n    # a comment\n    return x + LIMIT\n\n\nLIMIT = 3\n', True),
        ("def f(x):\n    return x - LIMIT\n\n\nLIMIT = 3\n", False),
        ("def f(x):\n    return x + LIMIT\n\n\nLIMIT = 4\n", False),
        ("def f(x):\n    return (lambda y: y + 2)(x) + LIMIT\n\n\nLIMIT = 3\n", False),
    ],
    ids=["comments", "another operator", "another constant", "an inner function"],
)
def test_loaded_code_has_one_digest_whatever_its_comments(text: str, is_same: bool) -> None:
    def loaded(source: str) -> str:
        module = ModuleType("m")
        exec(source, vars(module))  # the test's own text
        return code_digest(module)

    assert (loaded(text) == loaded(SOURCE)) is is_same


def test_two_commits_of_the_real_pack_are_opened_and_differ_where_the_second_one_edits(
    tmp_path: Path,
) -> None:
    from harness.documents import load_claim
    from harness.engines.packs import load_pack

    repo, pack = tmp_path / "repo", load_pack("k3_decode")
    package = repo / pack.repository_prefix
    shutil.copytree(pack.root, package, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    git(repo, "init", "-q")
    commit(repo)
    with (package / "cpu" / "attn_res.py").open("a") as source:
        source.write("\n\ndef never_called() -> int:\n    return 1\n")
    commit(repo)
    change, tree = load_change(repo, "HEAD~1", "HEAD", Limits())
    request = replace(
        plan_request(), pack=pack, claim=load_claim(pack.claim_file()), change=change.without_hunks()
    )
    (check,) = (c for c in plan(request) if "/rebuild/" in c.id)
    context = replace(stage_context(FakePack(), tmp_path), pack=pack, tree=tree)

    outcome = judge(check, sample(check, context))
    tree.close()

    assert outcome.status is Status.PASS, outcome.summary
    figures = {figure.name: figure.value for figure in outcome.figures}
    assert figures == {"differing_files": 1, "differing_modules": 1, "differing_binaries": 0}


def commit(repo: Path) -> None:
    git(repo, "add", "-A")
    git(repo, "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-q", "-m", "one more")


def git(repo: Path, *words: str) -> None:
    subprocess.run(("git", *words), cwd=repo, check=True, capture_output=True)
