"""The labelled changes of a real tree; `recipes/measure.py` runs them over three releases of vLLM."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from harness.documents import load_zone_map, parse_yaml

FILE = Path(__file__).parent / "recipes/recipes.yaml"
LABELS = {"clean", "open", "reach", "dependency", "other_model"}


def recipes() -> list[dict[str, Any]]:
    data = parse_yaml(FILE.read_bytes(), FILE.name)
    assert isinstance(data, dict)
    return data["recipes"]  # type: ignore[return-value]  # plain data


def test_recipes_have_unique_names_known_labels_and_a_reason() -> None:
    names = Counter(recipe["id"] for recipe in recipes())
    assert [name for name, count in names.items() if count > 1] == []
    assert {recipe["label"] for recipe in recipes()} == LABELS
    assert all(len(recipe["reason"]) > 15 for recipe in recipes())


def test_there_are_enough_of_each_label_to_measure_recall_and_false_alarms() -> None:
    counts = Counter(recipe["label"] for recipe in recipes())
    assert counts["clean"] >= 20
    assert counts["reach"] >= 20
    assert sum(counts.values()) >= 40


def test_planted_lines_name_the_file_they_go_to_within_the_paths_of_the_change() -> None:
    for recipe in recipes():
        assert ("plant" in recipe) == ("at" in recipe)
        if "at" in recipe:
            assert any(recipe["at"].startswith(path) for path in recipe["paths"])


def test_the_zone_map_was_tried_on_whole_releases_as_it_is_now() -> None:
    record = json.loads((FILE.parent / "zone_coverage.json").read_text())
    assert record["zone_map"] == load_zone_map("vllm").digest()
    assert len(record["releases"]) >= 3
    assert {v: r["unknown"] for v, r in record["releases"].items() if r["unknown"]} == {}


def test_every_pattern_of_the_zone_map_matches_something_in_some_release() -> None:
    releases = json.loads((FILE.parent / "zone_coverage.json").read_text())["releases"].values()
    assert set.intersection(*(set(release["idle"]) for release in releases)) == set()


@pytest.mark.parametrize("name", ["held_out.yaml", "held_out_second.yaml", "held_out_fourth.yaml"])
def test_held_out_recipes_name_their_label_kind_and_reason(name: str) -> None:
    data = parse_yaml((FILE.parent / name).read_bytes(), name)
    assert isinstance(data, dict)
    listed: Any = data["recipes"]
    names = Counter(recipe["id"] for recipe in listed)
    assert [n for n, count in names.items() if count > 1] == []
    assert {recipe["label"] for recipe in listed} <= LABELS
    assert all(recipe["kind"] and len(recipe["reason"]) > 4 for recipe in listed)
    assert sum(recipe["label"] == "clean" for recipe in listed) >= 20
    assert sum(recipe["label"] == "reach" for recipe in listed) >= 40
