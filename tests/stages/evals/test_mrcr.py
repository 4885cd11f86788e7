"""MRCR: known answers under the official rule, rows in the data set's schema, and bands."""

import json
import random
from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import pytest

from harness.domain.errors import InputError
from harness.domain.resources import data_folder
from harness.engines.serving import Message
from harness.stages.evals.data import (
    FOLDER_VARIABLE,
    load_rows,
    o200k_counter,
    sources,
    write_rows,
)
from harness.stages.evals.questions import band_of, pick_by_band, read_aime, read_mrcr
from harness.stages.evals.scorers import mrcr, mrcr_of_document

LONG = "".join(chr(97 + n % 26) for n in range(180))
"""Under 200 characters: difflib leaves out nothing."""
KNOWN: tuple[tuple[str, str, str, float], ...] = (
    # response, answer, random text, score: 2 x matches / (length of both), the random text left out of both
    ("XYhello", "XYhello", "XY", 1.0),
    ("hello", "XYhello", "XY", 0.0),
    ("", "XYhello", "XY", 0.0),
    ("XY", "XYhello", "XY", 0.0),
    (" XYhello", "XYhello", "XY", 0.0),
    ("xyhello", "XYhello", "XY", 0.0),
    ("Here it is: XYhello", "XYhello", "XY", 0.0),
    ("XYXYhello", "XYhello", "XY", 2 * 5 / 12),
    ("XYhell", "XYhello", "XY", 2 * 4 / 9),
    ("XYhello!", "XYhello", "XY", 2 * 5 / 11),
    ("XY hello", "XYhello", "XY", 2 * 5 / 11),
    ("XYhello\n", "XYhello", "XY", 2 * 5 / 11),
    ("XYHELLO", "XYhello", "XY", 0.0),
    ("XYaaaa", "XYbbbb", "XY", 0.0),
    ("XYabcd", "XYbcda", "XY", 2 * 3 / 8),
    ("XYabxcd", "XYabcd", "XY", 2 * 4 / 9),
    ("XYab", "XYcdab", "XY", 2 * 2 / 6),
    ("XYba", "XYab", "XY", 2 * 1 / 4),
    ("XY東京の詩", "XY東京の詩", "XY", 1.0),
    ("XY東京", "XY東京の詩", "XY", 2 * 2 / 6),
    ("XYe\u0301", "XY\u00e9", "XY", 0.0),
    ("XY🙂🙂", "XY🙂", "XY", 2 * 1 / 3),
    ("XY" + LONG, "XY" + LONG, "XY", 1.0),
    ("XY" + LONG[:90], "XY" + LONG, "XY", 2 * 90 / 270),
    # 200 characters and more: difflib drops what is frequent, so only what stands at the same place matches
    ("XY" + "a" * 200, "XY" + "a" * 200, "XY", 1.0),
    ("XYb" + "a" * 200, "XY" + "a" * 200, "XY", 0.0),
    ("XY", "XY", "XY", 1.0),
    ("XYhello", "hello", "XY", 1.0),
)


@pytest.mark.parametrize(("response", "answer", "prefix", "score"), KNOWN)
def test_known_answers_score_as_the_official_rule_says(
    response: str, answer: str, prefix: str, score: float
) -> None:
    assert mrcr(response, answer, prefix) == pytest.approx(score, abs=1e-12)
    document = {"prompt": "[]", "answer": answer, "random_string_to_prepend": prefix}
    assert mrcr_of_document(document, [response]) == {"mrcr": pytest.approx(score, abs=1e-12)}


def test_the_rule_keeps_difflibs_defaults_and_takes_the_prefix_from_both() -> None:
    source = random.Random(1)
    words = [source.choice(("tapir", "moon", "river", "song", "stone")) for _ in range(60)]
    spoiled = [w if n % 10 else "nothing" for n, w in enumerate(words)]
    answer, response = "aYooSG8CQg" + " ".join(words), "aYooSG8CQg" + " ".join(spoiled)
    official = mrcr(response, answer, "aYooSG8CQg")
    other = SequenceMatcher(None, response, answer, autojunk=False).ratio()
    assert official == pytest.approx(SequenceMatcher(None, response[10:], answer[10:]).ratio())
    assert official < other - 0.1


def _row(**changed: Any) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": "Write a poem about tapirs"},
        {"role": "assistant", "content": "Naïve 東京 🙂\nनमस्ते"},
        {"role": "user", "content": "Prepend aYoo to the 1st (1 indexed) poem about tapirs."},
    ]
    return {
        "prompt": json.dumps(messages, ensure_ascii=False), "answer": "aYooNaïve 東京 🙂\nनमस्ते",
        "random_string_to_prepend": "aYoo", "n_needles": 2, "desired_msg_index": 0, "total_messages": 3,
        "n_chars": 90, "date_added": "04-12-2025", **changed,
    }  # fmt: skip


def _words(text: str) -> int:
    return len(text.split())


def test_a_row_of_the_data_set_keeps_its_chat_its_unicode_and_its_length(tmp_path: Path) -> None:
    rows = write_rows([_row()], tmp_path, "mrcr")
    (question,) = read_mrcr(rows.rows, 2, _words)
    assert rows.kind == "generated"
    assert question.messages[1] == Message(role="assistant", content="Naïve 東京 🙂\nनमस्ते")
    assert question.target == "aYooNaïve 東京 🙂\nनमस्ते"
    assert question.context == 5 + 4 + 10 + 4
    assert question.prompt == _row()["prompt"]


def test_a_row_of_megabytes_passes_through_whole(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "é" * 200_000}, {"role": "assistant", "content": "東" * 300_000}]
    prompt = json.dumps([*turns, {"role": "user", "content": "Prepend aYoo"}])
    assert len(prompt) > 3_000_000
    (question,) = read_mrcr(write_rows([_row(prompt=prompt)], tmp_path, "long").rows, 2, len)
    assert [len(m.content) for m in question.messages] == [200_000, 300_000, 12]
    assert question.context == 500_012 + len(_row()["answer"])
    assert band_of(question.context) == "262144-524288"


def test_rows_of_other_needle_counts_are_of_another_task() -> None:
    rows = [_row(), _row(n_needles=4), _row(n_needles=8)]
    assert [q.id for q in read_mrcr(rows, 4, _words)] == ["4needle-1"]
    assert len(read_mrcr(rows, None, _words)) == 3


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"prompt": "Write a poem"}, "no JSON list"),
        ({"prompt": json.dumps([{"role": "wizard", "content": "x"}])}, "no JSON list"),
        ({"prompt": json.dumps([{"role": "assistant", "content": "x"}])}, "does not end with the user"),
        ({"prompt": "[]"}, "does not end with the user"),
        ({"answer": "Naïve"}, "does not begin with"),
        ({"random_string_to_prepend": ""}, "does not begin with"),
        ({"answer": None}, "has no answer"),
    ],
)
def test_a_row_that_is_not_of_the_schema_is_named(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=f"row 1.*{words}"):
        read_mrcr([_row(), _row(**changed)], 2, _words)


def test_bands_hold_their_upper_edge_and_the_first_both() -> None:
    lengths = (4095, 4096, 8192, 8193, 131072, 1048576, 1048577)
    assert [band_of(n) for n in lengths] == [
        None, "4096-8192", "4096-8192", "8192-16384", "65536-131072", "524288-1048576", None,
    ]  # fmt: skip


def test_questions_are_picked_by_band_and_a_band_without_any_is_an_error() -> None:
    rows = [_row(answer="aYoo" + "x" * n) for n in (5000, 6000, 7000, 9000)]
    questions = read_mrcr(rows, 2, len)
    picked = pick_by_band(questions, ["4096-8192", "8192-16384"], 2)
    assert [q.id for q in picked] == ["2needle-0", "2needle-1", "2needle-3"]
    with pytest.raises(InputError, match="no question of 16384-32768 tokens"):
        pick_by_band(questions, ["4096-8192", "16384-32768"], 2)


def test_aime_rows_have_a_problem_and_an_integer() -> None:
    (question,) = read_aime([{"id": "7", "problem": "What is $2+2$?", "answer": "004"}])
    assert (question.id, question.target) == ("7", "4")
    assert question.prompt == "Question: What is $2+2$?\nAnswer:"
    with pytest.raises(InputError, match="no integer from 0 to 999"):
        read_aime([{"problem": "?", "answer": "1000"}])
    with pytest.raises(InputError, match="two rows have the id '1'"):
        read_aime([{"id": "1", "problem": "?", "answer": "1"}] * 2)
    with pytest.raises(InputError, match="no question"):
        read_aime([])


def test_every_official_source_names_a_revision_and_the_digest_of_each_file() -> None:
    assert set(sources()) == {"mrcr_2needle", "mrcr_4needle", "mrcr_8needle", "aime25"}
    assert all(len(source.revision) == 40 and source.files for source in sources().values())


def test_files_beside_the_hub_count_as_official_by_their_bytes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "math-ai" / "aime25"
    folder.mkdir(parents=True)
    (folder / "test.jsonl").write_text('{"id": "1", "problem": "?", "answer": "1"}\n')
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(InputError, match="holds other bytes"):
        load_rows("aime25", "official")


def test_a_file_that_somebody_brings_is_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"id": "1", "problem": "Größe?", "answer": "1"}\n', encoding="utf-8")
    monkeypatch.setenv(FOLDER_VARIABLE, str(path))
    rows = load_rows("aime25", "local")
    assert (rows.kind, rows.rows[0]["problem"]) == ("local", "Größe?")
    monkeypatch.delenv(FOLDER_VARIABLE)
    with pytest.raises(InputError, match="names no file of rows"):
        load_rows("aime25", "local")


def test_lengths_are_counted_with_tiktokens_own_file_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tiktoken", reason="the evals extra is not installed")
    (tmp_path / "o200k_base.tiktoken").write_text("IQ== 0\n")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(InputError, match="is not tiktoken's o200k_base"):
        o200k_counter()


def test_lm_eval_finds_the_three_tasks_over_the_pinned_data() -> None:
    manager = pytest.importorskip("lm_eval.tasks", reason="the evals extra is not installed")
    folder = data_folder("evals") / "mrcr"
    found = manager.TaskManager(include_path=str(folder), include_defaults=False)
    assert sorted(found.all_tasks) == ["mrcr_2needle", "mrcr_4needle", "mrcr_8needle"]
    for name in found.all_tasks:
        text = (folder / f"{name}.yaml").read_text(encoding="utf-8")
        assert f"revision: {sources()[name].revision}" in text
        assert all(f'"{file}"' in text for file in sources()[name].files)


def test_lm_eval_runs_a_task_over_rows_in_the_hubs_schema_and_scores_by_the_official_rule(
    tmp_path: Path,
) -> None:
    pytest.importorskip("lm_eval", reason="the evals extra is not installed")
    from harness.engines.lm_eval_model import FasttrackLM, run_yaml_task

    (question,) = read_mrcr([_row()], 2, _words)
    seen: list[str] = []

    def answer(prompts: Sequence[str]) -> list[str]:
        seen.extend(prompts)
        return ["aYooNaïve"] * len(prompts)

    file = data_folder("evals") / "mrcr" / "mrcr_2needle.yaml"
    score = run_yaml_task(FasttrackLM(answer_all=answer), file, [dict(question.document)], tmp_path)
    assert seen == [question.prompt]
    assert score(dict(question.document), "aYooNaïve") == pytest.approx(2 * 5 / (5 + 17))
    assert score(dict(question.document), "Naïve") == 0.0


def test_the_hub_is_asked_for_the_pinned_files_at_the_pinned_revision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    datasets = pytest.importorskip("datasets", reason="the evals extra is not installed")
    asked: list[Any] = []

    def load_dataset(name: str, **how: Any) -> list[dict[str, str]]:
        asked.append((name, how))
        return [{"id": "0", "problem": "?", "answer": "7"}]

    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = load_rows("aime25", "official")
    assert (rows.kind, rows.rows[0]["answer"]) == ("hub", "7")
    how = {
        "revision": "563bb8404243c5f09de6ec262f2db674fe5bce9b", "data_files": ["test.jsonl"],
        "split": "train",
    }  # fmt: skip
    assert asked == [("math-ai/aime25", how)]


def test_a_hub_that_cannot_be_reached_is_an_error_that_says_what_to_bring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    datasets = pytest.importorskip("datasets", reason="the evals extra is not installed")

    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(InputError, match=f"ConnectionError.*set {FOLDER_VARIABLE}"):
        load_rows("mrcr_2needle", "official")
