"""The table that says how a layer's concurrent pieces share a GPU: its entries, its words, its readers."""

import json
from pathlib import Path

import pytest
from k3_decode.dispatch import load_guard
from k3_decode.overlap import FILE, aside_from, overlap_of, places_of, read
from k3_decode.shapes import K3


def test_every_bucket_of_the_claim_has_an_entry_at_every_claimed_number_of_ranks() -> None:
    envelope = load_guard().envelope
    shards = {K3.shared_inter // ranks for ranks in envelope.tp}
    assert set(read().entries) == {(width, bucket) for width in shards for bucket in envelope.batch_buckets}


def test_the_shared_expert_is_narrow_at_the_shards_and_rows_where_that_was_measured_to_pay() -> None:
    inter = K3.rank(16).shared_inter
    assert [overlap_of(inter, rows).first_narrow(inter) for rows in (1, 4, 5)] == [0, 0, None]
    inter = K3.rank(8).shared_inter
    assert [overlap_of(inter, rows).first_narrow(inter) for rows in (1, 2)] == [768, None]
    assert overlap_of(K3.rank(4).shared_inter, 1).shared == "along"
    assert overlap_of(K3.rank(2).shared_inter, 1).shared == "aside"
    assert overlap_of(K3.rank(4).shared_inter, 3).shared == "aside"


def test_a_shard_or_step_between_two_entries_takes_the_wider_one_and_beyond_all_the_widest() -> None:
    assert overlap_of(64, 1) == overlap_of(384, 1)
    assert overlap_of(500, 1) == overlap_of(768, 1)
    assert overlap_of(9999, 200) == overlap_of(6144, 64)


def test_widths_without_a_narrow_form_take_the_other_place_and_every_multiprocessor() -> None:
    found = overlap_of(384, 2)
    assert found.served(has_narrow=True) == found
    assert found.spared_sms == 20
    other = found.served(has_narrow=False)
    assert (other.shared, other.experts_sms, other.spared_sms) == ("aside", 132, 0)


def test_a_chain_prepares_what_some_step_up_to_its_most_rows_needs() -> None:
    assert places_of(overlap_of, 1536, 1, has_narrow=True) == {"along"}
    assert places_of(overlap_of, 1536, 8, has_narrow=True) == {"along", "aside"}
    assert places_of(aside_from(1), 3072, 1, has_narrow=True) == {"aside"}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"shared": "nowhere"}, "places the shared expert 'nowhere'"),
        ({"experts_sms": 133}, "gives 133 and 20 of 132 multiprocessors"),
        ({"experts_sms": 120}, "gives narrow multiprocessors away twice"),
        ({"prefetch": {"head": 16}}, r"prefetches \['head'\]"),
        ({"prefetch": {"tail": 8}}, "no multiple of 16"),
    ],
)
def test_an_entry_that_cannot_be_run_is_refused(
    changed: dict[str, object], words: str, tmp_path: Path
) -> None:
    table = json.loads(FILE.read_text())
    table["entries"][0] |= changed
    file = tmp_path / "table.json"
    file.write_text(json.dumps(table))
    with pytest.raises(ValueError, match=words):
        read(file)


def test_two_entries_of_one_cell_are_refused(tmp_path: Path) -> None:
    table = json.loads(FILE.read_text())
    file = tmp_path / "table.json"
    file.write_text(json.dumps({**table, "entries": [table["entries"][0], dict(table["entries"][0])]}))
    with pytest.raises(ValueError, match="second one"):
        read(file)
