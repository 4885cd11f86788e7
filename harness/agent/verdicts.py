"""The policy's verdict on a candidate: its files as a commit, validated and gated as any pull request is.

A clone of the repository holds what the loop began with and, on top, one commit of the candidate's files.
`validate` runs confined, over that clone's pack, and leaves a bundle. What it says of that bundle is not
believed, as the candidate's code ran beside it: `gate` reads the bundle afterwards, in a process of its own
over the pack that the loop began with, holds it against the clone, and judges its samples again.
"""

import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from pydantic import ValidationError

from harness.agent.commands import CommandEnded, Ran, run_command
from harness.domain.check import StageName
from harness.domain.errors import InputError
from harness.domain.pack import Pack
from harness.domain.verdict import Answer, Verdict

__all__ = ["Asked", "VerdictDesk", "is_admitted"]

VALIDATE_S, GATE_S = 3600.0, 900.0
WHO = ("-c", "user.name=fasttrack", "-c", "user.email=fasttrack@localhost", "-c", "commit.gpgsign=false")
Progress = Callable[[int, int, str], None]


class Asked(NamedTuple):
    """What the gate said, or why it could not be asked."""

    verdict: Verdict | None
    words: str
    bundle: Path | None


class VerdictDesk:
    """A clone in which candidates become commits."""

    def __init__(
        self, pack: Pack, repo: Path, policy: str, start: Mapping[str, str], folder: Path, trusted: Path,
        *, has_gpu: bool,
    ) -> None:  # fmt: skip
        """`trusted` is a source root with the pack that the loop began with."""
        self._pack, self._policy, self._folder, self._has_gpu = pack, policy, folder, has_gpu
        self._trusted = trusted
        self.clone = folder / "clone"
        if not self.clone.is_dir():
            _git(folder, "clone", "--quiet", "--shared", str(repo.resolve()), str(self.clone))
        self.base = self._committed(start, "What the loop began with")

    def ask(
        self, files: Mapping[str, str], number: int, journal: Path, on_progress: Progress | None = None,
        cancelled: threading.Event | None = None,
    ) -> Asked:  # fmt: skip
        """Validate and gate these files; the journal travels in the bundle."""
        scratch = self._scratch(f"verdict{number}")
        bundle = scratch / "bundle"
        asked = ("--journal", str(journal), "--out", str(bundle))
        try:
            ran = self._run(("validate",), files, f"Attempt {number}", asked, scratch, on_progress, cancelled)
            bad = [o for o in ran.document["outcomes"] if o["status"] not in ("PASS", "SKIPPED")]
            verdict = self._gated(bundle, self._scratch(f"gate{number}"), cancelled)
        except (CommandEnded, KeyError, TypeError, ValidationError) as error:
            return Asked(None, f"no verdict: {error}"[:3000], None)
        said = verdict.reasons[0] if verdict.reasons else ""
        if bad and verdict.answer is not Answer.ADMITTED:
            said = f"{bad[0]['check']} {bad[0]['status']}: {bad[0]['summary']}; {said}"
        return Asked(verdict, f"{verdict.answer.value.replace('_', ' ')}: {said}"[:1500], bundle)

    def _gated(self, bundle: Path, scratch: Path, cancelled: threading.Event | None) -> Verdict:
        """What the gate makes of a bundle, where nothing of a candidate runs."""
        head = _git(self.clone, "rev-parse", "HEAD")
        arguments = (
            "gate", str(bundle), "--policy", self._policy, "--repo", str(self.clone), "--base", self.base,
            "--head", head,
        )  # fmt: skip
        ran = run_command(arguments, self._trusted, scratch, limit_s=GATE_S, cancelled=cancelled)
        return Verdict.model_validate(ran.document)

    def run_stage(
        self, files: Mapping[str, str], stage: str, tier: str, only: tuple[str, ...],
        on_progress: Progress | None = None, cancelled: threading.Event | None = None,
    ) -> Ran:  # fmt: skip
        """One stage over these files, as `fasttrack run STAGE --json` gives it.

        Raises `InputError` for a name that is no stage: an agent's words never become a path or an option.
        """
        known = [name.value for name in StageName]
        if stage not in known:
            raise InputError(f"{stage!r} is no stage; there are {', '.join(known)}")
        scratch = self._scratch("stage")
        words = tuple(f"--only={name}" for name in only)
        asked = (f"--tier={tier}", *words, "--out", str(scratch / "run"))
        return self._run(("run", stage), files, f"For {stage}", asked, scratch, on_progress, cancelled)

    @property
    def _tree(self) -> Path:
        return self.clone / PurePosixPath(self._pack.repository_prefix).parent

    def _scratch(self, name: str) -> Path:
        """An empty folder for one command."""
        scratch = self._folder / name
        if scratch.exists():
            shutil.rmtree(scratch)
        scratch.mkdir(parents=True)
        return scratch

    def _run(
        self, command: tuple[str, ...], files: Mapping[str, str], subject: str, asked: tuple[str, ...],
        scratch: Path, on_progress: Progress | None, cancelled: threading.Event | None,
    ) -> Ran:  # fmt: skip
        """A command over a commit of these files."""
        _git(self.clone, "checkout", "--quiet", "--detach", self.base)
        head = self._committed(files, subject)
        arguments = (
            *command, "--pack", self._pack.name, "--repo", str(self.clone), "--base", self.base,
            "--head", head, "--policy", self._policy, *asked,
        )  # fmt: skip
        return run_command(
            arguments, self._tree, scratch, limit_s=VALIDATE_S, has_gpu=self._has_gpu,
            on_progress=on_progress, cancelled=cancelled,
        )  # fmt: skip

    def _committed(self, files: Mapping[str, str], subject: str) -> str:
        """The commit of these files on what is checked out; HEAD where nothing differs."""
        for name, text in files.items():
            (self.clone / name).parent.mkdir(parents=True, exist_ok=True)
            (self.clone / name).write_text(text, encoding="utf-8")
        _git(self.clone, "add", "--", *files)
        if _git(self.clone, "status", "--porcelain", "--untracked-files=no"):
            _git(self.clone, *WHO, "commit", "--quiet", "--no-verify", "-m", subject)
        return _git(self.clone, "rev-parse", "HEAD")


def is_admitted(asked: Asked) -> bool:
    """Whether the policy's answer is yes."""
    return asked.verdict is not None and asked.verdict.answer is Answer.ADMITTED


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ("git", "-c", "core.hooksPath=/dev/null", *arguments), cwd=folder, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    if done.returncode:
        raise InputError(
            f"git {arguments[0]} in {folder} ended with {done.returncode}: {done.stderr.strip()[:400]}"
        )
    return done.stdout.strip()
