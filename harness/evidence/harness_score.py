"""The harness's own score, as it travels: the committed record of the fault suite, copied into every bundle.

A reviewer asks how good the judge is; the answer belongs to one harness, by digest, and says so where the
bundle was made with another. The record lies among the bundle's logs, bound by the manifest like any file.
"""

from pathlib import Path

from pydantic import ValidationError

from harness.domain.errors import InputError
from harness.domain.faults import FaultScore
from harness.domain.resources import data_folder
from harness.evidence.names import LOGS

__all__ = ["put_score", "read_score", "score_words"]

PACKAGED = Path("faults") / "smoke.json"
"""Below the packaged `bundles` folder."""
NAME = "harness_score.json"
MAX_BYTES = 8 * 2**20


def put_score(logs: Path) -> bool:
    """Copy the committed score into a run's logs; gives whether there is one."""
    try:
        content = (data_folder("bundles") / PACKAGED).read_bytes()
    except (OSError, InputError):
        return False
    logs.mkdir(parents=True, exist_ok=True)
    (logs / NAME).write_bytes(content)
    return True


def read_score(bundle: Path) -> FaultScore | None:
    """The score in a bundle's folder; None where it has none that can be read."""
    path = bundle / LOGS / NAME
    try:
        if path.is_symlink() or path.stat().st_size > MAX_BYTES:
            return None
        return FaultScore.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def score_words(score: FaultScore | None, harness_digest: str) -> str:
    """The score in one line, for the harness that made the bundle."""
    if score is None:
        return "not measured: the bundle holds no record of the fault suite"
    if score.harness_digest == harness_digest:
        return f"{score.words()}; measured with this harness"
    return f"{score.words()}; measured with harness {score.harness_digest[:12]}, which is not this one"
