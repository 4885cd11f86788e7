"""Stop before pip fetches a CUDA build of torch, which is several GB that nothing here uses.

    python .ci/require_cpu_torch.py PIP CONSTRAINTS [INDEX_URL]

Asks pip what it would install and downloads nothing but metadata. Exit code 0: a CPU build, or torch is there
already. 2: a CUDA build, or pip finds none.
"""

import json
import subprocess
import sys


def planned_torch(pip: str, constraints: str, index_url: str) -> dict[str, object] | None:
    """Metadata of the torch that pip would install; None where one that satisfies the constraint is
    installed.
    """
    command = [
        pip,
        "install",
        "--quiet",
        "--dry-run",
        "--no-deps",
        "--report",
        "-",
        "-c",
        constraints,
        "torch",
    ]
    if index_url:
        command += ["--index-url", index_url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(
            f"pip finds no torch: {done.stderr.strip().splitlines()[-1:]}; set TORCH_INDEX_URL to an index "
            "with CPU builds"
        )
    installs = json.loads(done.stdout)["install"]
    return installs[0]["metadata"] if installs else None


def main() -> int:
    """Exit code."""
    pip, constraints, index_url = sys.argv[1], sys.argv[2], (sys.argv[3:] or [""])[0]
    metadata = planned_torch(pip, constraints, index_url)
    if metadata is None:
        return 0
    needs = metadata.get("requires_dist") or []
    cuda = [
        need for need in needs if str(need).startswith(("nvidia-", "cuda-")) and "extra ==" not in str(need)
    ]
    if cuda:
        sys.stderr.write(
            f"torch {metadata['version']} would be a CUDA build (it wants {len(cuda)} CUDA packages, several "
            "GB); "
            "give an index with CPU builds: make TORCH_INDEX_URL=... , or install a CPU torch into .venv "
            "first\n"
        )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
