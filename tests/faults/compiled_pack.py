"""A pack of one kernel whose compiled files lie ready in `kernel/data`, so that the audit needs no compiler.

The PTX is the audit's own planted kernel of that name; cubin and SASS are what ptxas 13.0 (the hoisted load:
13.5) and nvdisasm 13.5 made of it. Run as a program, this module stands for the compiling process.
"""

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from harness.domain.check import StageName
from harness.domain.claim import Architecture
from harness.domain.faults import Sighting
from harness.domain.pack import KernelVariant, OpContract, Pack
from harness.faults.bench import Bench
from harness.faults.fault import Fault
from harness.faults.scenes import PackScene
from harness.stages import stage_of

__all__ = ["kernel_fault"]

DATA = Path(__file__).parent / "kernel" / "data"
ARCHITECTURE = "sm_90a"
SOUND = "hoisted_load_fixed"
"""Files of the kernels that are launched wrongly, with nothing wrong in them."""
GRIDS = {
    "tall_grid_fault": ("1", "a0.0 2048 *", "1"),
    "tall_grid_fixed": ("a0.0 2048 *", "1", "1"),
}
"""By kernel, how its host launches it over the rows of its first tensor."""


def kernel_fault(
    name: str, *, title: str, report: str, kernel: str, roles: tuple[tuple[str, str], ...]
) -> Fault:
    """A fault in compiled code: `<kernel>_fault` against `<kernel>_fixed`, with its parameters' roles."""

    def make(folder: Path, is_repaired: bool) -> Pack:
        variant = f"{kernel}_{'fixed' if is_repaired else 'fault'}"
        return cast("Pack", _CompiledPack(folder, variant, roles))

    return Fault(name, title, report, "kernel", "audit", PackScene(make, _audit))


class _CompiledPack:
    """The parts of `domain.pack.Pack` that the audit uses."""

    name = "compiled"
    repository_prefix = "kernels/compiled/"

    def __init__(self, root: Path, variant: str, roles: tuple[tuple[str, str], ...]) -> None:
        self.root, self._variant, self._roles = root, variant, roles
        (root / "cute").mkdir()
        (root / "cute" / "kernel.py").write_text(f"NAME = {variant!r}\n")

    def ops(self) -> tuple[OpContract, ...]:
        """One op."""
        return (
            OpContract(name="op", parameters=(), regimes=("gaussian",), implementations=("cute",), files=()),
        )

    def variants(self) -> tuple[KernelVariant, ...]:
        """One kernel."""
        return (
            KernelVariant(
                op="op", name=self._variant, architectures=(ARCHITECTURE,), parameters=self._roles,
                source="kernels/compiled/cute/kernel.py", is_smoke=True, sizes=(("x.0", "tokens"),),
            ),
        )  # fmt: skip

    def compile_command(
        self, architectures: Sequence[str], variants: Sequence[str], folder: Path
    ) -> tuple[str, ...]:
        """This module as a program."""
        return (sys.executable, str(Path(__file__)), str(folder / architectures[0]), *variants)


def _audit(bench: Bench, pack: Pack) -> Iterable[Sighting]:
    """What the audit says of the pack's kernel, whose name is left out so that fault and twin compare."""
    named = (
        Architecture(arch="cpu", level="dispatched"),
        Architecture.model_validate({"arch": ARCHITECTURE, "level": "compiled"}),
    )
    envelope = bench.request.claim.envelope.model_copy(update={"architectures": named})
    request = replace(
        bench.request, pack=pack, claim=bench.request.claim.model_copy(update={"envelope": envelope})
    )
    checks = stage_of(StageName.AUDIT).plan(request)
    return [s.model_copy(update={"subject": f"audit of {ARCHITECTURE}"}) for s in bench.run(checks, request)]


def _main(folder: Path, names: list[str]) -> None:
    folder.mkdir()
    for name in names:
        launch: dict[str, Any] = {"kernel": "planted", "is_dependent": True, "cluster": [1, 1, 1]}
        launch |= {"block": [128, 1, 1], "dynamic_shared_bytes": 0, "grid": GRIDS.get(name, ("1", "1", "1"))}
        for suffix in (".ptx", ".cubin", ".sass"):
            shutil.copy(DATA / f"{name if name not in GRIDS else SOUND}{suffix}", folder / f"{name}{suffix}")
        record = {"error": None, "launches": [launch], "sass_missing": None}
        (folder / f"{name}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2:])
