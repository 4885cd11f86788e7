"""A pack of one kernel whose compiled files lie ready in `data/`, so that no compiler is needed."""

import sys
from collections.abc import Sequence
from pathlib import Path

from harness.domain.pack import KernelVariant, OpContract

DATA = Path(__file__).parent / "data"
PARAMETERS = (("x", "activation"), ("out", "output"))


class CopyPack:
    """The parts of `domain.pack.Pack` that the audit uses. `kind` is `fixed` or `fault`."""

    name = "copies"
    repository_prefix = "kernels/copies/"

    def __init__(self, root: Path, kind: str = "fixed", **changes: object) -> None:
        self.root = root
        self.kind = kind
        self.changes = changes
        (root / "cute").mkdir(exist_ok=True)
        (root / "cute" / "copy.py").write_text("from copies.shapes import WIDTH\n")
        (root / "shapes.py").write_text("WIDTH = 128\n")

    def ops(self) -> tuple[OpContract, ...]:
        return (
            OpContract(
                name="copy", parameters=(), regimes=("gaussian",), implementations=("cute",), files=()
            ),
        )

    def variants(self) -> tuple[KernelVariant, ...]:
        fields = {
            "op": "copy",
            "name": f"hoisted_load_{self.kind}",
            "architectures": ("sm_90a",),
            "parameters": PARAMETERS,
            "source": "kernels/copies/cute/copy.py",
            "is_smoke": True,
            "sizes": (("x.0", "tokens"),),
            **self.changes,
        }
        return (KernelVariant.model_validate(fields),)

    def compile_command(
        self, architectures: Sequence[str], variants: Sequence[str], folder: Path
    ) -> tuple[str, ...]:
        return (
            sys.executable,
            str(Path(__file__).parent / "copy_files.py"),
            str(folder / architectures[0]),
            *variants,
        )
