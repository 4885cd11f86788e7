"""Whole numbers of records: every one keeps its canonical form."""

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest
from pydantic import AfterValidator, BeforeValidator, ValidationError

import harness.domain
from harness.documents import load_claim
from harness.domain.cell import Cell
from harness.domain.check import Check, SampleTable, Threshold
from harness.domain.errors import InputError
from harness.domain.record import MAX_WHOLE, Record

CLAIM = Path(__file__).parents[2] / "kernels" / "k3_decode" / "claim.yaml"


def _records(kind: type[Record] = Record) -> Iterator[type[Record]]:
    for module in pkgutil.iter_modules(harness.domain.__path__, "harness.domain."):
        importlib.import_module(module.name)
    for found in kind.__subclasses__():
        if found.__module__.startswith("harness.domain."):
            yield found
            yield from _records(found)


def _bare_numbers(hint: Any) -> bool:
    """Whether a type holds a whole number that nothing bounds."""
    if hint is int:
        return True
    if get_origin(hint) is Annotated:
        kept, *metadata = get_args(hint)
        is_bounded = any(
            isinstance(m, AfterValidator | BeforeValidator)
            and getattr(m.func, "__name__", "") == "_require_exact"
            for m in metadata
        )
        return not is_bounded and _bare_numbers(kept)
    return any(_bare_numbers(part) for part in get_args(hint))


def test_every_whole_number_of_every_noun_is_bounded() -> None:
    found = list(dict.fromkeys(_records()))
    assert len(found) > 50
    unbounded = []
    for record in found:
        hints = {**record.__annotations__}
        unbounded += [f"{record.__name__}.{name}" for name, hint in hints.items() if _bare_numbers(hint)]
    assert unbounded == []


def test_the_largest_exact_number_is_taken_and_the_next_refused() -> None:
    assert Cell(context=MAX_WHOLE).canonical().count(b"9007199254740991") == 1
    with pytest.raises(ValidationError, match="no canonical JSON"):
        Cell(context=MAX_WHOLE + 1)


@pytest.mark.parametrize("value", [2**53, -(2**53), 10**400])
def test_a_large_number_turns_into_no_float_on_its_way(value: int) -> None:
    with pytest.raises(ValidationError, match="no canonical JSON"):
        Threshold(name="margin", value=value)
    with pytest.raises(ValidationError, match="no canonical JSON"):
        SampleTable(name="timings", columns=("us",), rows=((value,),))
    check = {"id": "sweep/a", "stage": "sweep", "proves": "x", "cost_s": 0, "parameters": [("seed", value)]}
    with pytest.raises(ValidationError, match="no canonical JSON"):
        Check.model_validate(check)


def test_smaller_bounds_still_hold() -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        Cell(batch=0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("max_rows_per_step: 64", f"max_rows_per_step: {2**53}"),
        ("  tp: [1, 2, 4, 8, 16]", f"  tp: [1, {10**30}]"),
        ("  tp: [1, 2, 4, 8, 16]", "  tp: [0]"),
    ],
)
def test_a_claim_with_a_number_beyond_json_is_refused_in_words(tmp_path: Path, old: str, new: str) -> None:
    text = CLAIM.read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "claim.yaml").write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(InputError, match="envelope"):
        load_claim(tmp_path / "claim.yaml")
