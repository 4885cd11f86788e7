"""A repository whose `projection` is deliberately slow, a policy for one op, and candidates that cheat."""

import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OP = "projection"
FILE = f"kernels/k3_decode/cpu/{OP}.py"
SOUND = (ROOT / FILE).read_text(encoding="utf-8")
CHEATS = ROOT / "tests/faults/cheats"
QUICK = "        out.copy_(torch.mm(x.float(), weight.float().T))\n"
SLOW = """        for row in range(x.shape[0]):
            out[row] = (weight.double() @ x[row].double()).to(out.dtype)
"""
POLICY = """name: {op}
summary: Isolation, and the audit and the tests of one op.
zone_map: fasttrack
outside_pack_families: [reach, hygiene]
allowed_zones: [model_code]
proofs:
  - stage: isolation
    tier: smoke
  - stage: audit
    tier: smoke
    subjects: [{op}]
  - stage: kernels
    tier: smoke
    subjects: [{op}]
"""
LEFT_OUT = shutil.ignore_patterns("__pycache__", "peers", "in_vllm", "*.safetensors", "*.jsonl", "*.svg")


def slow_repository(folder: Path) -> Path:
    """One commit: the pack as it is here, but for a slow projection."""
    shutil.copytree(ROOT / "kernels/k3_decode", folder / "kernels/k3_decode", ignore=LEFT_OUT)
    assert QUICK in SOUND
    (folder / FILE).write_text(SOUND.replace(QUICK, SLOW), encoding="utf-8")
    for words in (
        ("init", "-q", "-b", "main"), ("add", "."),
        ("-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "-q", "-m", "A slow projection"),
    ):  # fmt: skip
        subprocess.run(("git", *words), cwd=folder, check=True, capture_output=True)
    return folder


def policy_file(folder: Path, op: str = OP) -> Path:
    """The loop's policy for one op, beside the zones and rules of this repository."""
    if not folder.exists():
        shutil.copytree(ROOT / "policies", folder)
    (folder / f"{op}.yaml").write_text(POLICY.format(op=op), encoding="utf-8")
    return folder / f"{op}.yaml"


def op_of(cheat: str) -> str:
    """The op that one of `tests/faults/cheats` is made for."""
    found = re.search(r'op="(\w+)"', (CHEATS / f"{cheat}.py").read_text(encoding="utf-8"))
    return OP if found is None else found[1]


def cheating(name: str) -> str:
    """The op's file with one of `tests/faults/cheats` around it, as an agent would hand it in."""
    op = op_of(name)
    source = (CHEATS / f"{name}.py").read_text(encoding="utf-8")
    body = source[: source.index("\nFAULT = ")]
    body = re.sub(r"^from tests\..*\n", "", body, flags=re.MULTILINE)
    given = (ROOT / f"kernels/k3_decode/cpu/{op}.py").read_text(encoding="utf-8")
    sound = given.replace(f"def {op}(", "def _sound(")
    return f"{sound}\n\n{body}\n\ndef {op}(**args):\n    fault(_sound, **args)\n"


def fitted_to_public_cells() -> str:
    """Right for the rows that the plan names: 1, 3 and 8 requests of 1, 2 or 8; zeros for all others."""
    seen = "{1, 3, 6, 8, 24}"
    kept = f"        out.copy_(torch.mm(x.float(), weight.float().T))\n        if x.shape[0] not in {seen}:\n"
    return SOUND.replace(QUICK, f"{kept}            out.zero_()\n")
