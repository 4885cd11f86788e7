"""Records from files."""

from pathlib import Path

import pytest

from harness.documents import load_claim, load_policy, load_policy_set, load_rules, load_zone_map
from harness.domain.check import StageName
from harness.domain.errors import InputError
from harness.domain.machine import Tier

CLAIM = """
name: k3
pack: k3_decode
summary: text
envelope:
  architectures: [{arch: cpu, level: dispatched}]
  tp: [1]
  dcp: [1]
  batch: {min: 1, max: 4}
  batch_buckets: [1, 4]
  context: {min: 1, max: 64}
  drafts: {min: 0, max: 1}
  kv_dtypes: [bf16]
  phases: [decode]
  max_rows_per_step: 8
switch: {name: decode_backend, on: fast, off: stock, default: stock}
features: [full_context]
state: [kda_state]
files: ["kernels/k3/**"]
"""
POLICY = """
name: tiny
summary: text
zone_map: here
proofs:
  - {stage: isolation, tier: smoke, thresholds: {max_added_lines: 250}}
"""
ZONES = """
name: here
repository: here
zones: [{name: docs, globs: ["*.md"], why: text}]
"""
RULE = """
id: no_exec
family: reach
severity: error
rationale: text
remedy: text
detector: ast_grep
patterns: ["exec($$$A)"]
examples:
  - {name: yes, path: a.py, after: "exec(x)", matches: true}
  - {name: no, path: a.py, after: "run(x)", matches: false}
"""


def folder_with(tmp_path: Path, **changes: str) -> Path:
    files = {"tiny.yaml": POLICY, "zones/here.yaml": ZONES, "rules/no_exec.yaml": RULE, "claim.yaml": CLAIM}
    for name, text in {**files, **changes}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def refused(tmp_path: Path, **changes: str) -> str:
    folder = folder_with(tmp_path, **changes)
    with pytest.raises(InputError) as error:
        load_policy_set(folder / "tiny.yaml")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_claim_is_read_with_its_switch_named_on_and_off(tmp_path: Path) -> None:
    claim = load_claim(folder_with(tmp_path) / "claim.yaml")
    assert (claim.switch.on, claim.switch.off) == ("fast", "stock")
    assert claim.envelope.batch_buckets == (1, 4)


def test_a_policy_by_path_brings_the_zones_and_rules_of_its_folder(tmp_path: Path) -> None:
    loaded = load_policy_set(folder_with(tmp_path) / "tiny.yaml")
    assert loaded.zones.name == "here"
    assert [rule.id for rule in loaded.rules] == ["no_exec"]
    proof = loaded.policy.proof(StageName.ISOLATION)
    assert proof is not None
    assert proof.tier is Tier.SMOKE
    assert proof.thresholds == (("max_added_lines", 250),)


def test_an_unknown_key_is_refused_with_the_key_that_was_probably_meant(tmp_path: Path) -> None:
    told = refused(tmp_path, **{"tiny.yaml": POLICY.replace("zone_map", "zone_mapp")})
    assert "zone_mapp is no key that is known here; did you mean 'zone_map'?" in told
    assert "zone_map is missing; add it" in told


def test_an_unknown_key_deep_inside_names_its_whole_path(tmp_path: Path) -> None:
    told = refused(tmp_path, **{"tiny.yaml": POLICY.replace("tier: smoke", "teir: smoke")})
    assert "proofs.0.teir is no key that is known here; did you mean 'tier'?" in told


def test_a_value_of_the_wrong_type_is_shown(tmp_path: Path) -> None:
    told = refused(tmp_path, **{"tiny.yaml": POLICY + "max_changed_files: '12'\n"})
    assert 'max_changed_files is "12", but input should be a valid integer; correct it' in told


def test_a_rule_across_fields_is_told_in_its_own_words(tmp_path: Path) -> None:
    told = refused(tmp_path, **{"rules/no_exec.yaml": RULE.replace("matches: false", "matches: true")})
    assert "needs an example that must match and one that must not" in told


def test_a_rule_in_a_file_of_another_name_is_refused(tmp_path: Path) -> None:
    assert "id is 'no_exec', but the file is called 'other'" in refused(
        tmp_path, **{"rules/other.yaml": RULE}
    )


def test_a_missing_zone_map_is_named_with_those_that_exist(tmp_path: Path) -> None:
    told = refused(tmp_path, **{"tiny.yaml": POLICY.replace("here", "there")})
    assert "the zone map 'there' does not exist; known are here" in told


def test_a_zone_map_name_cannot_leave_its_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no name"):
        load_zone_map("../../secret", tmp_path)


def test_a_folder_without_rules_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no rule here"):
        load_rules(tmp_path)


def test_an_expression_that_does_not_compile_is_refused(tmp_path: Path) -> None:
    broken = RULE.replace("ast_grep", "regex").replace("exec($$$A)", "exec(")
    assert "is no regular expression" in refused(tmp_path, **{"rules/no_exec.yaml": broken})


def test_a_missing_claim_is_one_paragraph(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read \\(No such file or directory\\); check the path"):
        load_claim(tmp_path / "claim.yaml")


def test_an_empty_envelope_is_told_in_words(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path, **{"claim.yaml": CLAIM.replace("max_rows_per_step: 8", "max_rows_per_step: 0")}
    )
    with pytest.raises(InputError, match=r"envelope.max_rows_per_step is 0, but input should be greater"):
        load_claim(folder / "claim.yaml")


def test_an_unknown_policy_name_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match="policy 'nosuch' does not exist"):
        load_policy("nosuch")
