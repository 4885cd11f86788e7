"""The zone map of vLLM over the file lists of whole releases: what it covers, and patterns that match
nothing.

Run by hand: `python tests/stages/isolation/recipes/zone_coverage.py SCRATCH [--write]`. SCRATCH is what
`releases.py` makes. The record beside this file holds counts and digests, no list; a test compares it with
the map, so that an edit of the map that was tried on no release turns red.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any, Final

from releases import DIGESTS  # type: ignore[import-not-found]  # a script beside this one

from harness.documents import load_policy_set, load_zone_map
from harness.stages.isolation.policy_check import check_policy
from harness.stages.isolation.zones import ZoneIndex

RECORD: Final = Path(__file__).with_name("zone_coverage.json")
EPOCH: Final = date(2026, 1, 1)
PACKAGING: Final = re.compile(r"(PKG-INFO|[^/]+\.egg-info/.*)")
"""What making a source distribution adds to a tree."""


def main() -> int:
    """Print what every tagged release gives; 1 where a file has no zone, or the record differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    found = {"zone_map": load_zone_map("vllm").digest(), "releases": coverage(asked.scratch)}
    text = json.dumps(found, indent=1, sort_keys=True) + "\n"
    print(text)
    if asked.write:
        RECORD.write_text(text, encoding="utf-8")
    is_whole = not any(release["unknown"] for release in found["releases"].values())  # type: ignore[attr-defined]  # plain data
    return 0 if is_whole and RECORD.read_text(encoding="utf-8") == text else 1


def coverage(scratch: Path) -> dict[str, dict[str, Any]]:
    """What the map makes of each release's files."""
    loaded = load_policy_set("fast_track")
    found = {}
    for version, digest in DIGESTS.items():
        paths = [path for path in files(scratch, version) if not PACKAGING.fullmatch(path)]
        zones = ZoneIndex(loaded.zones, frozenset(paths))
        report = check_policy(loaded.policy, loaded.zones, loaded.rules[:1], paths, EPOCH).zones
        assert report is not None
        found[version] = {
            "sdist_sha256": digest,
            "files": len(paths),
            "files_sha256": hashlib.sha256("\n".join(sorted(paths)).encode()).hexdigest(),
            "zones": dict(sorted(Counter(zones.zone_of(path) for path in paths).items())),
            "unknown": list(report.unknown),
            "idle": list(report.idle),
        }
    return found


def files(scratch: Path, version: str) -> list[str]:
    """Every path of a release."""
    listed = subprocess.run(
        ["git", "-C", str(scratch), "ls-tree", "-r", "-z", "--name-only", f"v{version}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return listed.stdout.split("\0")[:-1]


if __name__ == "__main__":
    sys.exit(main())
