"""Claims, policies, zone maps and rules from their files.

Invariant: what is returned is complete and consistent with the files it names; a policy whose zone map is
missing, a glob that does not compile or a rule in a file of another name raises `InputError`.
"""

import re
from pathlib import Path
from typing import NamedTuple, TypeVar

from pathspec import GitIgnoreSpec

from harness.documents.validation import parse_record
from harness.documents.yaml_text import MAX_BYTES, PlainData, parse_yaml
from harness.domain.claim import Claim
from harness.domain.errors import InputError
from harness.domain.policy import Policy, Rule, ZoneMap
from harness.domain.record import Record
from harness.domain.resources import data_folder

__all__ = [
    "PolicySet",
    "load_claim",
    "load_policy",
    "load_policy_set",
    "load_record",
    "load_rules",
    "load_zone_map",
]
R = TypeVar("R", bound=Record)

_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,63}")


class PolicySet(NamedTuple):
    """A policy and the files it names."""

    policy: Policy
    zones: ZoneMap
    rules: tuple[Rule, ...]
    """Every rule of the folder, in order of id; the policy's families select among them."""


def load_record(model: type[R], path: Path) -> R:
    """A record of any kind from a YAML file, with every problem in one `InputError`."""
    return parse_record(model, _read(path), str(path))


def load_claim(path: Path) -> Claim:
    """The claim in a file."""
    claim = load_record(Claim, path)
    _require_globs(claim.files, f"{path}: files")
    return claim


def load_policy(reference: str | Path) -> Policy:
    """A policy by name (`smoke`) among the packaged ones, or by the path of a YAML file."""
    path = _policy_path(reference)
    data = _read(path)
    if isinstance(data, dict) and isinstance(data.get("proofs"), list):
        data["proofs"] = [_with_threshold_pairs(proof, path) for proof in _list(data["proofs"])]
    policy = parse_record(Policy, data, str(path))
    for waiver in policy.waivers:
        _require_globs((waiver.path,), f"{path}: waivers")
    return policy


def load_policy_set(reference: str | Path) -> PolicySet:
    """A policy with its zone map and rules, from the folder that the policy lies in."""
    policy = load_policy(reference)
    folder = _policy_path(reference).parent
    return PolicySet(policy, load_zone_map(policy.zone_map, folder), load_rules(folder))


def load_zone_map(name: str, folder: Path | None = None) -> ZoneMap:
    """The zone map `zones/<name>.yaml` of a policy folder, by default the packaged one."""
    root = folder if folder is not None else data_folder("policies")
    path = root / "zones" / f"{_require_name(name)}.yaml"
    if not path.is_file():
        raise InputError(f"{path}: the zone map {name!r} does not exist; {_known(root / 'zones')}")
    zones = parse_record(ZoneMap, _read(path), str(path))
    if zones.name != name:
        raise InputError(f"{path}: name is {zones.name!r}, but the file is called {name!r}; make them one")
    for zone in zones.zones:
        _require_globs(zone.globs, f"{path}: zone {zone.name}")
    return zones


def load_rules(folder: Path | None = None) -> tuple[Rule, ...]:
    """Every rule `rules/<id>.yaml` of a policy folder, by default the packaged one, in order of id."""
    root = (folder if folder is not None else data_folder("policies")) / "rules"
    rules = tuple(_load_rule(path) for path in sorted(root.glob("*.yaml")))
    if not rules:
        raise InputError(f"{root}: there is no rule here; add one, or name the folder that has them")
    return rules


def _load_rule(path: Path) -> Rule:
    rule = parse_record(Rule, _read(path), str(path))
    if rule.id != path.stem:
        raise InputError(f"{path}: id is {rule.id!r}, but the file is called {path.stem!r}; make them one")
    expressions = rule.allow + (rule.patterns if rule.detector == "regex" else ())
    for expression in expressions:
        try:
            re.compile(expression)
        except re.error as error:
            raise InputError(
                f"{path}: {expression!r} is no regular expression: {error}; correct it"
            ) from error
    if rule.detector in ("ast_grep", "regex") and not rule.patterns:
        raise InputError(f"{path}: detector {rule.detector!r} needs patterns; add at least one")
    return rule


def _policy_path(reference: str | Path) -> Path:
    """A reference with a suffix or a separator is a path; anything else a name."""
    text = str(reference)
    if isinstance(reference, Path) or "/" in text or text.endswith((".yaml", ".yml")):
        path = Path(reference)
        if not path.is_file():
            raise InputError(f"{path}: there is no such policy file; name one, or a packaged policy")
        return path
    root = data_folder("policies")
    path = root / f"{_require_name(text)}.yaml"
    if not path.is_file():
        raise InputError(f"policy {text!r} does not exist in {root}; {_known(root)}")
    return path


def _read(path: Path) -> PlainData:
    try:
        with path.open("rb") as file:
            return parse_yaml(file.read(MAX_BYTES + 1), str(path))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError(f"{path}: cannot be read ({reason}); check the path") from error


def _require_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InputError(f"{name[:80]!r} is no name; use lower-case letters, digits, `_`, `.` and `-`")
    return name


def _known(folder: Path) -> str:
    return "known are " + (", ".join(sorted(p.stem for p in folder.glob("*.yaml"))) or "none")


def _require_globs(globs: tuple[str, ...], where: str) -> None:
    for glob in globs:
        try:
            GitIgnoreSpec.from_lines([glob])
        except ValueError as error:
            raise InputError(f"{where}: {glob!r} is no git-style pattern: {error}; correct it") from error


def _with_threshold_pairs(proof: PlainData, path: Path) -> PlainData:
    """`thresholds` is a mapping in the file and pairs in the record."""
    if not isinstance(proof, dict) or "thresholds" not in proof:
        return proof
    thresholds = proof["thresholds"]
    if not isinstance(thresholds, dict):
        raise InputError(f"{path}: proofs.thresholds is no mapping of names to values; write `name: value`")
    return {**proof, "thresholds": [[name, value] for name, value in thresholds.items()]}


def _list(value: PlainData) -> list[PlainData]:
    assert isinstance(value, list)
    return value
