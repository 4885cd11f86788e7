"""Paths and modules to zones."""

from harness.domain.policy import Zone, ZoneMap
from harness.stages.isolation.zone_rules import check_zones
from harness.stages.isolation.zones import ZoneIndex

MAP = ZoneMap(
    name="m",
    repository="r",
    zones=(
        Zone(name="docs", globs=("*.md",), why="t"),
        Zone(name="model_code", globs=("/vllm/models/k3/**",), why="t"),
        Zone(name="other_models", globs=("/vllm/models/**", "!/vllm/models/common/**"), why="t"),
        Zone(name="shared_core", globs=("/vllm/**",), why="t"),
    ),
)
PATHS = frozenset(
    {"vllm/__init__.py", "vllm/models/k3/__init__.py", "vllm/models/k3/step.py", "kernels/k3/ops.py"}
)


def test_the_first_zone_that_matches_has_the_path() -> None:
    zones = ZoneIndex(MAP, PATHS)
    assert zones.zone_of("vllm/models/k3/README.md") == "docs"
    assert zones.zone_of("vllm/models/k3/step.py") == "model_code"
    assert zones.zone_of("vllm/models/llama/step.py") == "other_models"
    assert zones.zone_of("vllm/v1/core.py") == "shared_core"


def test_a_negated_pattern_leaves_the_path_to_a_later_zone() -> None:
    assert ZoneIndex(MAP, PATHS).zone_of("vllm/models/common/ops.py") == "shared_core"


def test_a_path_that_no_zone_matches_is_unknown() -> None:
    assert ZoneIndex(MAP, PATHS).zone_of("elsewhere/vllm/models/k3/step.py") == "unknown"


def test_modules_and_what_they_hold_are_found_as_files() -> None:
    zones = ZoneIndex(MAP, PATHS)
    assert zones.file_of_module("vllm.models.k3.step.Step.run") == "vllm/models/k3/step.py"
    assert zones.file_of_module("vllm.models.k3") == "vllm/models/k3/__init__.py"
    assert zones.file_of_module("k3.ops") == "kernels/k3/ops.py"
    assert zones.zone_of_module("vllm.models.k3.step") == "model_code"


def test_a_module_from_outside_has_no_zone() -> None:
    assert ZoneIndex(MAP, PATHS).zone_of_module("torch.nn") is None


def test_an_unknown_path_is_told_the_line_that_would_give_it_a_zone() -> None:
    zones = ZoneIndex(MAP, PATHS)
    (inside,) = check_zones("tools/build/all.sh", None, zones, None)
    assert inside.remedy == (
        "move the file into a folder that has a zone, or ask the gatekeepers for a line in "
        "policies/zones/m.yaml: /tools/build/** under the globs of the zone whose owners shall review it; "
        "another tree than this map's needs a policy with its own map"
    )
    (at_root,) = check_zones("setup.cfg", None, zones, None)
    assert "/setup.cfg under the globs" in at_root.remedy
