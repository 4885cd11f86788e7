"""The control of every test with a server: what GitHub's description does not allow is noticed."""

import json
from typing import Any

import pytest

from tests.forge.description import answer_faults, example_answer, find_operation, request_faults

ANNOTATION = {"path": "a", "start_line": 1, "end_line": 1, "annotation_level": "notice", "message": "m"}
RUN: dict[str, Any] = {
    "name": "fasttrack", "head_sha": "a" * 40, "status": "completed", "conclusion": "success",
    "output": {"title": "t", "summary": "s", "annotations": [ANNOTATION]},
}  # fmt: skip


def _faults(body: dict[str, Any]) -> list[str]:
    operation = find_operation("POST", "/repos/o/r/check-runs")
    assert operation is not None
    return request_faults(operation, "", json.dumps(body).encode())


def test_a_sound_check_run_has_no_fault() -> None:
    assert _faults(RUN) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": None}, "None is not of type 'string'"),
        ({"conclusion": "maybe"}, "'maybe' is not one of"),
        ({"colour": "red"}, "the body has 'colour'"),
        ({"output": {**RUN["output"], "annotations": [ANNOTATION] * 51}}, "maxItems"),
        ({"output": {"title": "t"}}, "'summary' is a required property"),
        ({"output": {**RUN["output"], "summary": "x" * 65_536}}, "maxLength"),
        ({"output": {**RUN["output"], "annotations": [{**ANNOTATION, "annotation_level": "bad"}]}}, "'bad'"),
    ],
)
def test_what_github_would_refuse_is_a_fault(change: dict[str, Any], words: str) -> None:
    assert any(words in fault for fault in _faults({**RUN, **change}))


def test_a_path_that_github_does_not_have_is_no_operation() -> None:
    assert find_operation("POST", "/repos/o/r/checks") is None
    assert find_operation("DELETE", "/repos/o/r/check-runs") is None


def test_an_answer_of_ours_that_github_would_not_give_is_a_fault() -> None:
    operation = find_operation("GET", "/repos/o/r/pulls/1")
    assert operation is not None
    pull = example_answer(operation, 200)
    assert answer_faults(operation, 200, pull) == []
    assert answer_faults(operation, 200, {**pull, "head": {**pull["head"], "sha": 5}}) == [
        "head/sha: type: 5 is not of type 'string'"
    ]
