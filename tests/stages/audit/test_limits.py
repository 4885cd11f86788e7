"""A change that loosens its own limits is told, by what the base held its kernels to."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.domain.check import Outcome, Severity, Status
from harness.domain.errors import EvidenceError
from harness.stages import audit
from harness.stages.audit import planning
from harness.stages.audit.limits import base_files, base_limits, limits_of, loosened, lost_limits
from tests.stages.audit.example_pack import CopyPack
from tests.stages.audit.test_stage import context, request

FILE = "kernels/copies/cute/expected.json"
KERNEL = "hoisted_load_fixed"


class BaseTree:
    """A repository whose base holds one file."""

    def __init__(self, content: object, others: dict[str, bytes] | None = None) -> None:
        self.files = dict(others or {}) | ({} if content is None else {FILE: json.dumps(content).encode()})

    def read(self, side: str, path: str) -> bytes | None:
        assert side == "base"
        return self.files.get(path)

    def paths(self, side: str) -> tuple[str, ...]:
        return tuple(sorted(self.files))


@pytest.fixture(autouse=True)
def _compiler_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "compiler_missing", lambda: None)


def outcome_of(folder: Path, base: object, head: dict[str, Any], file: str = FILE) -> Outcome:
    """The audit of the sound kernel, whose limits are `head`'s, where the base has others."""
    (folder / "copies").mkdir()
    pack = CopyPack(folder / "copies", expected=tuple(head.get(KERNEL, {}).items()), limits_file=file)
    (folder / "copies" / "cute" / "expected.json").write_text(json.dumps(head))
    (check,) = audit.plan(request(pack))
    made = replace(context(pack, folder), tree=BaseTree(base))
    return audit.judge(check, audit.sample(check, made))


def test_a_limit_that_the_change_loosens_fails_and_names_old_and_new(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, {KERNEL: {"max_registers": 48}}, {KERNEL: {"max_registers": 64}})
    assert outcome.status is Status.FAIL
    (finding,) = outcome.findings
    assert (finding.rule, finding.path) == ("limit_loosened", "kernels/copies/cute/copy.py")
    assert finding.message == "the limit registers was 48 at the base and is 64 now"


def test_a_limit_that_the_change_takes_away_fails(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, {KERNEL: {"max_registers": 48}}, {KERNEL: {}})
    assert [f.message for f in outcome.findings] == ["the limit registers was 48 at the base and is gone now"]


def test_a_loosened_limit_that_is_accepted_with_a_reason_passes_and_stays_in_the_report(
    tmp_path: Path,
) -> None:
    head = {
        KERNEL: {"max_registers": 64},
        "_accepted": {KERNEL: {"sm_90a.max_registers": [48, 64, "two rows more a warp"]}},
    }
    outcome = outcome_of(tmp_path, {KERNEL: {"max_registers": 48}}, head)
    assert outcome.status is Status.PASS
    (finding,) = outcome.findings
    assert (finding.severity, finding.waived) == (Severity.WARNING, None)
    assert finding.message == (
        f"the limit registers was 48 at the base and is 64 now; accepted in {FILE}: two rows more a warp"
    )


@pytest.mark.parametrize(
    "words",
    [
        [40, 64, "from another value"],
        [48, 56, "to another value"],
        [48, 64],
        [48, 64, ""],
        [48, 64, " \n"],
        "yes",
        None,
    ],
)
def test_what_was_accepted_for_other_values_or_without_a_reason_accepts_nothing(
    words: object, tmp_path: Path
) -> None:
    head = {KERNEL: {"max_registers": 64}, "_accepted": {KERNEL: {"max_registers": words}}}
    assert outcome_of(tmp_path, {KERNEL: {"max_registers": 48}}, head).status is Status.FAIL


@pytest.mark.parametrize("base", [None, {}, {KERNEL: {"max_registers": 64}}, {KERNEL: {"max_registers": 72}}])
def test_limits_that_are_new_the_same_or_tighter_pass(base: object, tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, base, {KERNEL: {"max_registers": 64}})
    assert (outcome.status, outcome.findings) == (Status.PASS, ())
    (figure,) = (f for f in outcome.figures if f.name == "limits_of_base")
    assert figure.value == (4 if base and KERNEL in base else 0)  # type: ignore[operator]


def test_a_spill_that_the_base_did_not_allow_is_a_looser_limit(tmp_path: Path) -> None:
    head = {KERNEL: {"max_registers": 64, "spill_bytes": 16}}
    outcome = outcome_of(tmp_path, {KERNEL: {"max_registers": 64}}, head)
    assert [f.message for f in outcome.findings] == ["the limit spill was 0 at the base and is 16 now"]


def test_limits_of_an_architecture_come_before_general_ones() -> None:
    expected = {"max_registers": 64, "sm_90a.max_registers": 48, "min_wide_loads_percent": 50}
    assert limits_of(expected, "sm_90a")["registers"] == 48
    assert limits_of(expected, "sm_100a")["registers"] == 64
    assert limits_of({}, "sm_90a") == {"spill": 0, "shared_memory": 232448, "multicast": 0}


def test_a_general_limit_in_place_of_two_is_looser_where_it_is_larger() -> None:
    old = {"sm_90a.max_registers": 48, "sm_100a.max_registers": 64}
    assert list(loosened(old, {"max_registers": 64})) == [("sm_90a.max_registers", 48, 64)]


def test_a_limit_that_the_policy_sets_is_the_policys() -> None:
    table = base_limits([{"k": {"max_registers": 48}}], None, "k", "sm_90a", ["registers"])
    assert [row[0] for row in table.rows] == ["spill", "shared_memory", "multicast"]


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"[]", b'{"k": 48}', b'{"k": {"max_registers": "x"}}', b"\xff"]
)
def test_a_file_that_holds_no_limits_is_refused_in_words(content: bytes) -> None:
    with pytest.raises(EvidenceError, match="the file of a pack's limits does not hold any"):
        base_files(BaseTree(None, {FILE: content}), "kernels/copies/", FILE)


@pytest.mark.parametrize("file", ["", "kernels/copies/cute/limits.json", "kernels/copies/absent.json"])
def test_a_limit_is_held_to_the_bases_whatever_file_the_change_names(file: str, tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, {KERNEL: {"max_registers": 48}}, {KERNEL: {"max_registers": 64}}, file)
    assert outcome.status is Status.FAIL
    assert [f.message for f in outcome.findings] == ["the limit registers was 48 at the base and is 64 now"]


def test_a_file_of_limits_that_moved_with_its_limits_as_they_were_is_no_finding(tmp_path: Path) -> None:
    limits = {KERNEL: {"max_registers": 64}}
    outcome = outcome_of(tmp_path, limits, limits, "kernels/copies/limits.json")
    assert (outcome.status, outcome.findings) == (Status.PASS, ())


def test_other_json_of_the_base_and_other_packs_files_hold_no_limits() -> None:
    limits = b'{"k": {"max_registers": 48}}'
    others = {
        "kernels/copies/tuned.json": b'{"k": {"rows": 4}}',
        "kernels/copies/empty.json": b'{"k": {}}',
        "kernels/copies/lines.json": b'{"a": 1}\n{"b": 2}\n',
        "kernels/copies/list.json": b"[1]",
        "kernels/copies/limits.txt": limits,
        "kernels/others/limits.json": limits,
    }
    assert base_files(BaseTree(None, others), "kernels/copies/", "") == ()
    kept = {"kernels/copies/own.json": limits}
    assert base_files(BaseTree(None, kept), "kernels/copies/", "") == ({"k": {"max_registers": 48}},)


def test_of_two_files_of_the_base_the_tighter_limit_counts() -> None:
    files = [{"k": {"max_registers": 64}}, {"k": {"max_registers": 48}}, {"j": {"max_registers": 8}}]
    assert base_limits(files, None, "k", "sm_90a", []).rows[1] == ("registers", 48, None, None)


def test_a_kernel_under_a_new_name_with_looser_limits_is_told_and_names_the_old_one(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, {"copy_old": {"max_registers": 48}}, {KERNEL: {"max_registers": 64}})
    (finding,) = outcome.findings
    assert (finding.rule, finding.severity) == ("limits_lost", Severity.WARNING)
    assert finding.message == (
        "no new kernel is held to the limits of those that are gone since the base: copy_old"
    )


def test_a_new_kernel_without_limits_beside_a_base_with_some_is_told(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, {"copy_old": {"spill_bytes": 8}}, {})
    assert [f.message for f in outcome.findings] == [
        f"the kernel {KERNEL} is new and has no limits, while the base has some"
    ]


@pytest.mark.parametrize("registers", [48, 40])
def test_a_kernel_under_a_new_name_that_is_held_as_the_old_one_was_is_no_finding(
    registers: int, tmp_path: Path
) -> None:
    head = {KERNEL: {"max_registers": registers}}
    outcome = outcome_of(tmp_path, {"copy_old": {"max_registers": 48}}, head)
    assert (outcome.status, outcome.findings) == (Status.PASS, ())


def test_a_new_kernel_beside_all_those_of_the_base_loses_no_limits(tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    (old,) = CopyPack(tmp_path / "copies", name="copy_old").variants()
    (new,) = CopyPack(tmp_path / "copies", expected=(("max_registers", 200),)).variants()
    files = [{"copy_old": {"max_registers": 48}}]
    assert lost_limits(files, new, [old, new], "sm_90a", []) is None
    assert lost_limits(files, old, [old, new], "sm_90a", []) is None
    assert lost_limits(files, new, [new], "sm_90a", ["registers"]) is None  # the policy sets it
