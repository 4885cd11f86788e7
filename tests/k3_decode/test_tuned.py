"""Tuned choices: exact entries first, the nearest where an axis allows it, and the ledger says which."""

import json
from pathlib import Path
from typing import Any

import pytest
from k3_decode import tuning
from k3_decode.ops.contract import Cell
from k3_decode.pack import live_variants
from k3_decode.shapes import K3, NANO
from k3_decode.tuned import lookup
from k3_decode.tuned.lookup import choice, configured, source_of

from harness.cli import main
from harness.domain.errors import InputError
from harness.domain.tuning import TunedTable, TuningRecord
from harness.engines.packs import load_pack

ENTRY = {
    "kernel": "experts", "shape": [["experts", 8], ["top_k", 2], ["tokens", 4]], "near": ["tokens"],
    "configuration": [["most_waste", 4]],
}  # fmt: skip
OTHER = ENTRY | {
    "shape": [["experts", 8], ["top_k", 2], ["tokens", 64]], "configuration": [["most_waste", 2]],
}  # fmt: skip


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a table for `cpu` of two entries."""
    monkeypatch.setattr(lookup, "FOLDER", tmp_path)
    (tmp_path / "cpu.json").write_text(json.dumps({"entries": [ENTRY, OTHER]}))
    return tmp_path


def shape(tokens: int, experts: int = 8) -> dict[str, int]:
    return {"experts": experts, "top_k": 2, "tokens": tokens}


@pytest.mark.parametrize(("tokens", "waste", "source"), [
    (4, 4, "exact"),
    (8, 4, "nearest (experts 8 top_k 2 tokens 4)"),
    (32, 2, "nearest (experts 8 top_k 2 tokens 64)"),
])  # fmt: skip
def test_the_nearest_entry_in_octaves_stands_in_and_says_so(
    tables: Path, tokens: int, waste: int, source: str
) -> None:
    found = choice("cpu", "experts", shape(tokens))
    assert found is not None
    assert (dict(found.values), found.source) == ({"most_waste": waste}, source)


def test_no_entry_stands_in_along_an_axis_that_does_not_allow_it(tables: Path) -> None:
    assert choice("cpu", "experts", shape(4, experts=16)) is None
    assert source_of("cpu", "experts", shape(4, experts=16)) == "built-in"


def test_an_architecture_without_a_table_takes_what_is_built_in(tables: Path) -> None:
    assert choice("sm_90a", "experts", shape(4)) is None


def test_a_choice_that_is_tried_goes_before_the_table_and_leaves_with_its_block(tables: Path) -> None:
    with configured("cpu", "experts", shape(4), {"most_waste": 1}):
        found = choice("cpu", "experts", shape(4))
        assert found is not None
        assert (dict(found.values), found.source) == ({"most_waste": 1}, "tried")
    assert source_of("cpu", "experts", shape(4)) == "exact"


def test_the_ledgers_words_name_each_tuned_kernel_and_its_entry(tables: Path) -> None:
    tuning.tuned_words.cache_clear()
    words = tuning.tuned_words("cpu", NANO.rank(1), 4, 2)
    tuning.tuned_words.cache_clear()
    assert words == "experts nearest (experts 8 top_k 2 tokens 4)"


def test_spaces_are_declared_for_attention_and_experts_on_a_cpu() -> None:
    cell = Cell(NANO.rank(1), 3, 8)
    found = {op: tuning.space_of(op, "cpu", cell) for op in ("mla_attend", "experts", "router")}
    assert found["router"] is None
    assert found["mla_attend"] is not None
    assert found["mla_attend"].shape == {"queries": 16}
    assert found["experts"] is not None
    assert found["experts"].shape == shape(24)


def test_what_cannot_be_launched_on_sm_90a_is_refused_with_its_reason() -> None:
    pytest.importorskip("cutlass")
    space = tuning.space_of("projection", "cute", Cell(K3.rank(8), 2))
    assert space is not None
    assert (space.kernel, space.shape) == ("row_product", {"rows": 6288, "k": 7168, "tokens": 8})
    assert tuning.refused(space.kernel, space.shape, space.incumbent) == ""
    threads = space.incumbent | {"row_warps": 8, "k_warps": 8}
    assert tuning.refused(space.kernel, space.shape, threads) == "2048 threads a block"
    registers = space.incumbent | {"row_tiles": 4, "depth": 16}
    assert tuning.refused(space.kernel, space.shape, registers) == (
        "264 registers a thread for weights and sums alone"
    )


def test_bytes_in_flight_bound_a_configuration_below_the_ceiling() -> None:
    pytest.importorskip("cutlass")
    shape_ = {"rows": 1024, "k": 7168, "tokens": 16}
    tiling = {"row_tiles": 1, "row_warps": 1, "k_warps": 2, "cluster": 1, "depth": 4}
    few = tiling | {"blocks_per_sm": 1, "is_grouped": 0}
    moved = 1024 * 7168 * 2
    # 128 blocks of 2 warps hold 4 steps of 512 bytes: 524288 bytes in flight, 28 times over, 0.5 us each.
    assert tuning.floor_us("row_product", shape_, few, moved, 4000.0) == pytest.approx(14.0)
    assert tuning.floor_us("row_product", shape_, few, moved, 100.0) == pytest.approx(moved / 100e3)


@pytest.mark.parametrize("arch", ["cpu", "sm_90a"])
def test_every_entry_of_a_committed_table_is_buildable_and_was_measured(arch: str) -> None:
    pack = load_pack("k3_decode")
    file = pack.tuned_file(arch)  # type: ignore[attr-defined]  # of packs with choices
    if not file.is_file():
        pytest.skip(f"no tuned table of {arch} is committed")
    table = TunedTable.from_json(file.read_bytes())
    for entry in table.entries:
        assert tuning.refused(entry.kernel, dict(entry.shape), dict(entry.configuration)) == ""
        assert entry.measured_us is not None
        assert entry.trials > 0


def listed(**changed: Any) -> str:
    return json.dumps({"entries": [ENTRY | changed]})


HOSTILE = {
    "no JSON": "{",
    "no object": "[]",
    "no entries": "{}",
    "entries of another kind": '{"entries": {}}',
    "an entry that is text": '{"entries": ["x"]}',
    "deep": "[" * 100_000,
    "NaN": '{"entries": NaN}',
    "an unknown kernel": listed(kernel="no_such"),
    "a kernel that is none": listed(kernel=["experts"]),
    "an axis too few": listed(shape=[["experts", 8], ["top_k", 2]]),
    "a shape below nothing": listed(shape=[["experts", -8], ["top_k", 2], ["tokens", 4]]),
    "a shape that is text": listed(shape=[["experts", "8"], ["top_k", 2], ["tokens", 4]]),
    "a choice that is half": listed(configuration=[["most_waste", 2.5]]),
    "a choice that is a yes": listed(configuration=[["most_waste", True]]),
    "a choice far too large": listed(configuration=[["most_waste", 10**12]]),
    "another axis": listed(configuration=[["depth", 2]]),
    "an axis twice": listed(configuration=[["most_waste", 2], ["most_waste", 4]]),
    "near along nothing": listed(near=["colour"]),
    "two for one shape": json.dumps({"entries": [ENTRY, ENTRY]}),
    "far too many": json.dumps({"entries": [ENTRY] * 3000}),
    "far too long": '{"entries": []' + " " * 2**20 + "}",
}  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_table_that_is_none_ends_in_one_paragraph_that_says_what_to_do(tables: Path, text: str) -> None:
    (tables / "cpu.json").write_text(text)
    with pytest.raises(InputError) as caught:
        load_pack("k3_decode")
    words = str(caught.value)
    assert words.startswith(f"{tables / 'cpu.json'} is no tuned table: ")
    assert "take its version at the base of the change, or remove the file" in words
    assert "\n" not in words
    assert len(words) < 900


def test_the_command_line_answers_a_broken_table_with_its_words_and_two(
    tables: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tables / "cpu.json").write_text("{")
    with pytest.raises(SystemExit) as ended:
        main.entry(["kernels", "list"])
    out, err = capfd.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith(f"fasttrack: {tables / 'cpu.json'} is no tuned table: ")
    assert "Traceback" not in err


@pytest.mark.parametrize(("tokens", "values", "words"), [
    (16, (8, 16, 32, 1, 64, 1, 0), "16384 threads a block"),
    (16, (2, 1, 8, 1, 64, 2, 0), "64 steps in flight"),
    (8, (2, 1, 8, 1, 4, 2, 0), "no launch asks for 8 tokens of that shape, but for 16"),
])  # fmt: skip
def test_a_choice_that_cannot_be_built_is_told_before_anything_is_compiled(
    tables: Path, tokens: int, values: tuple[int, ...], words: str
) -> None:
    pytest.importorskip("cutlass")
    names = [name for name, _, _ in tuning.AXES]
    chosen = [list(pair) for pair in zip(names, values, strict=True)]
    place = [["rows", 4096], ["k", 7168], ["tokens", tokens]]
    entries = [{"kernel": "row_product", "shape": place, "near": [], "configuration": chosen}]
    (tables / "sm_90a.json").write_text(json.dumps({"entries": entries}))
    load_pack("k3_decode")
    with pytest.raises(InputError) as caught:
        live_variants()
    assert f"for row_product at rows 4096 k 7168 tokens {tokens} cannot be built: {words}" in str(
        caught.value
    )


def test_every_choice_of_the_package_names_a_committed_search_that_made_it() -> None:
    root = Path(__file__).resolve().parents[2]
    records = [TuningRecord.from_json(f.read_bytes()) for f in root.glob("bundles/h200/*/tuning/*.json")]
    studies = {
        (record.digest(), s.space.kernel, s.space.shape): s for record in records for s in record.studies
    }
    for file in lookup.tables():
        table = TunedTable.from_json(file.read_bytes())
        assert lookup.read_table(file)
        for entry in table.entries:
            study = studies[(entry.record, entry.kernel, entry.shape)]
            assert (study.chosen, study.verdict) == (entry.configuration, entry.verdict)
            assert study.chosen_tests
            assert {status for _, status in study.chosen_tests} == {"PASS"}
