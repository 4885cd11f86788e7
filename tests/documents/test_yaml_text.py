"""YAML text into plain data."""

import pytest

from harness.documents import parse_yaml
from harness.domain.errors import InputError


def test_on_off_yes_and_dates_stay_text_and_only_true_and_false_are_booleans() -> None:
    data = parse_yaml("on: yes\noff: 2026-12-31\na: true\nb: 1:30\nc: 010\nd: 1.5\ne: ~\n", "f.yaml")
    assert data == {
        "on": "yes", "off": "2026-12-31", "a": True, "b": "1:30", "c": 10, "d": 1.5, "e": None,
    }  # fmt: skip


def test_a_quoted_number_stays_text() -> None:
    assert parse_yaml("a: '4'\n", "f.yaml") == {"a": "4"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: &x [1]\nb: *x\n", "f.yaml:1: an anchor or alias is not accepted here; write the value out"),
        ("a: !!python/name:os.system x\n", "f.yaml:1: the tag"),
        ("a: 1\na: 2\n", "f.yaml:2: the key 'a' for a second time is not accepted here"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2: a second document"),
        ("? [1, 2]\n: 3\n", "a key that is not plain text"),
        ("a:\n  <<: {b: 1}\n", "f.yaml:2: a merge key"),
        ("[" * 40 + "]" * 40, "more than 32 levels"),
        ("a: [1, 2\n", "this is no YAML"),
        ("", "the file is empty"),
        ("a: '\x00'\n", "this is no YAML"),
    ],
)
def test_what_is_refused_names_the_file_and_what_to_do(text: str, told: str) -> None:
    with pytest.raises(InputError) as error:
        parse_yaml(text, "f.yaml")
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_a_deep_document_is_refused_before_a_tree_is_built() -> None:
    with pytest.raises(InputError, match=r"more than 32 levels|this is no YAML"):
        parse_yaml("[" * 100_000, "f.yaml")


def test_a_file_over_the_limits_is_refused() -> None:
    with pytest.raises(InputError, match="over the limit of 1048576"):
        parse_yaml("a" * (2**20 + 1), "f.yaml")
    with pytest.raises(InputError, match="more than 50000 values"):
        parse_yaml("[" + "1," * 50_001 + "]", "f.yaml")


def test_bytes_that_are_not_utf8_are_refused() -> None:
    with pytest.raises(InputError, match="byte 3 is not UTF-8"):
        parse_yaml(b"a: \xff\n", "f.yaml")
