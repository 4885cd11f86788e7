"""The ledger: append-only, small, bounded, and readable after a crash."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.domain.errors import EvidenceError
from harness.domain.pack import Decision
from harness.engines.ledger import Ledger, read_ledger

FIRST = Decision(
    step=0, phase="decode", requests=2, rows=1, tokens=2, batch_bucket=2, is_graph=True, tp=1, dcp=1,
    drafts=0, context_min=25, context_max=25, path="optimised", reason="taken", layer_paths="oo",
)  # fmt: skip


def later(step: int, **fields: object) -> Decision:
    return FIRST.model_copy(
        update={"step": step, "context_min": 25 + step, "context_max": 25 + step, **fields}
    )


def kept(path: Path, *decisions: Decision, limit: int = 100) -> list[str]:
    with Ledger(path, limit) as ledger:
        for decision in decisions:
            ledger(decision)
    return path.read_text().splitlines()


def test_a_decision_like_an_earlier_one_is_one_short_line(tmp_path: Path) -> None:
    declined = later(1, path="stock", reason="switch_off", layer_paths="ss")
    lines = kept(tmp_path / "a.jsonl", FIRST, declined, later(2), later(3))
    assert lines[2:] == [
        '{"like":0,"step":2,"context":[27,27]}',
        '{"like":0,"step":3,"context":[28,28]}',
    ]
    assert read_ledger(lines) == ((FIRST, declined, later(2), later(3)), 0)


def test_a_dispatchers_own_decision_is_kept_as_the_record_of_its_fields(tmp_path: Path) -> None:
    with Ledger(tmp_path / "a.jsonl") as ledger:
        for decision in (FIRST, later(1), later(2)):
            ledger(SimpleNamespace(**decision.model_dump()))  # type: ignore[arg-type]  # only its fields count
        kept = ledger.decisions
    assert kept == [FIRST, later(1), later(2)]
    assert all(isinstance(decision, Decision) for decision in kept)


def test_a_decision_that_is_no_record_is_refused_where_it_is_made(tmp_path: Path) -> None:
    with Ledger(tmp_path / "a.jsonl") as ledger, pytest.raises(ValueError, match="path"):
        ledger(SimpleNamespace(**{**FIRST.model_dump(), "path": "fast"}))  # type: ignore[arg-type]  # on purpose


def test_beyond_its_limit_a_ledger_only_counts(tmp_path: Path) -> None:
    lines = kept(tmp_path / "a.jsonl", *(later(step) for step in range(5)), limit=2)
    decisions, counted = read_ledger(lines)
    assert ([d.step for d in decisions], counted) == ([0, 1], 3)


def test_a_torn_last_line_is_left_out_and_any_other_is_an_error(tmp_path: Path) -> None:
    lines = kept(tmp_path / "a.jsonl", FIRST, later(1))
    assert read_ledger([*lines, '{"like":0,"st'])[0] == (FIRST, later(1))
    with pytest.raises(EvidenceError, match="line 2 is no decision"):
        read_ledger([lines[0], '{"like":7,"step":1,"context":[1,1]}', lines[1]])


CRASHING = """
import os, signal, sys
from pathlib import Path
from harness.domain.pack import Decision
from harness.engines.ledger import Ledger
first = Decision.model_validate_json(sys.argv[2])
ledger = Ledger(Path(sys.argv[1]))
for step in range(7):
    ledger(first.model_copy(update={"step": step}))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_every_decision_before_a_crash_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    command = [sys.executable, "-c", CRASHING, str(path), FIRST.model_dump_json()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [d.step for d in read_ledger(path.read_text().splitlines())[0]] == list(range(7))
