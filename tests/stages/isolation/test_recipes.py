"""The labelled changes of a real tree; `recipes/measure.py` runs them over three releases of vLLM."""

from collections import Counter
from pathlib import Path
from typing import Any

from harness.documents import parse_yaml

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
