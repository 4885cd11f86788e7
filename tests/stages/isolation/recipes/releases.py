"""A scratch repository with one tag a release, from source distributions of vLLM in a folder.

Run by hand: `python tests/stages/isolation/recipes/releases.py SDISTS SCRATCH`. The digests are the package
index's own; an archive that differs is refused, as the recipes' labels hold for these bytes only.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Final

DIGESTS: Final = {
    "0.27.1": "eec2d54d137ac1e59cb4c39226dfee1943eefc8f4788f5821d7300d6acbdb646",
    "0.28.0": "ac96dd0ec5be9c13f2aa4bfb50498c4727110406f6e4980b58a4097e4d18634a",
    "0.29.0": "c03feb07943ecae9e69e7dc424d7c5569ecf8d1292513aef2a4de67af381cd97",
    "0.30.0": "5f8f4e890c042ffa1c3e103f81c35e2d96f60a0a175ac43a4adbae7006bef62b",
    "0.31.0": "dde46f1efbe846e5bd0c5c4ec6ec71842c42254c7ff3d9bebb2a57028715d380",
    "0.32.0": "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad",
    "0.33.0": "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
}
"""SHA-256 of `vllm-VERSION.tar.gz`."""
ENVIRONMENT: Final = {
    "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@a", "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@a", "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z",
    "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z",
    "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1",
}  # fmt: skip


def main() -> int:
    """Commit every release of which the folder has the archive."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sdists", type=Path)
    parser.add_argument("scratch", type=Path)
    asked = parser.parse_args()
    git(asked.scratch, "init", "-q", "--bare", str(asked.scratch.resolve()), at=Path("."))
    parent: str | None = None
    for version, digest in DIGESTS.items():
        archive = asked.sdists / f"vllm-{version}.tar.gz"
        if not archive.is_file():
            print(
                f"{version}: {archive} is missing; recipes that name it cannot be measured", file=sys.stderr
            )
            continue
        with archive.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != digest:
            raise SystemExit(f"{archive}: its sha256 is {found}, not {digest}; fetch it again")
        parent = commit(asked.scratch, archive, version, parent)
        print(f"v{version} {parent}")
    return 0


def commit(scratch: Path, archive: Path, version: str, parent: str | None) -> str:
    """The archive's files as one commit with a tag."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        (root,) = Path(folder).iterdir()
        index = {"GIT_INDEX_FILE": f"{folder}/index"}
        git(scratch, "--work-tree", str(root), "add", "-A", "-f", ".", at=root, extra=index)
        tree = git(scratch, "write-tree", extra=index)
        parents = ["-p", parent] if parent is not None else []
        made = git(scratch, "commit-tree", tree, *parents, "-m", version)
        git(scratch, "tag", "-f", f"v{version}", made)
        return made


def git(scratch: Path, *arguments: str, at: Path | None = None, extra: dict[str, str] | None = None) -> str:
    """One git command on the scratch repository."""
    done = subprocess.run(
        ["git", f"--git-dir={scratch.resolve()}", *arguments], cwd=at or scratch, text=True, check=True,
        capture_output=True, env={**os.environ, **ENVIRONMENT, **(extra or {})},
    )  # fmt: skip
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
