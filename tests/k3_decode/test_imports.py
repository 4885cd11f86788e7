"""Importing a package does nothing; asking for an op loads what it needs."""

import subprocess
import sys

from k3_decode.ops import OPS
from k3_decode.ops.contract import OP_NAMES


def loaded_by(statement: str) -> set[str]:
    """Which of torch and cutlass a fresh interpreter holds after a statement."""
    program = f"import sys\n{statement}\nprint([n for n in ('torch', 'cutlass') if n in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return {name for name in ("torch", "cutlass") if name in found.stdout}


def test_importing_the_packages_loads_no_torch() -> None:
    statement = "import k3_decode, k3_decode.ops, k3_decode.cpu, k3_decode.shapes, k3_decode.dispatch"
    assert loaded_by(statement) == set()


def test_the_cpu_table_needs_no_cutlass() -> None:
    statement = (
        "import torch\nfrom k3_decode.op_table import load_ops\nfrom k3_decode.shapes import NANO\n"
        "load_ops('cpu', NANO.rank(1), torch.device('cpu'))"
    )
    assert loaded_by(statement) == {"torch"}


def test_every_op_of_the_contract_is_there_once() -> None:
    assert [spec.name for spec in OPS.values()] == list(OP_NAMES)
