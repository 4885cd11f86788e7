"""YAML files that people write, read into records: claims, policies, zone maps and rules."""

from harness.documents.load import (
    PolicySet,
    load_claim,
    load_policy,
    load_policy_set,
    load_rules,
    load_zone_map,
)
from harness.documents.yaml_text import parse_yaml

__all__ = [
    "PolicySet", "load_claim", "load_policy", "load_policy_set", "load_rules", "load_zone_map", "parse_yaml",
]  # fmt: skip
