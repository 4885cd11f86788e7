"""A pack of one op with real torch code, whose candidate can be made to cheat or err in one way at a time.

`norm`: out = x * rsqrt(mean(x^2) + eps) * weight in bf16; `total` (fp32 state [4]) gets the row count added
at slot `slot`; `copy` is x, exact.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from harness.domain.cell import Cell
from harness.domain.pack import OpContract, OpParameter

EPS = 1e-5
WIDTH = 64


@dataclass(slots=True)
class Cheat:
    """What the candidate does wrong; nothing by default."""

    kind: str = "honest"
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    calls: int = 0


class NormPack:
    """The parts of `domain.pack.Pack` that the kernels stage uses."""

    name = "norms"
    root = Path(__file__).parent
    repository_prefix = "tests/stages/kernels/"
    smoke_model = "tiny"
    claimed_model = "tiny"

    def __init__(self, kind: str = "honest", implementations: tuple[str, ...] = ("cpu",)) -> None:
        self.cheat = Cheat(kind)
        self._implementations = implementations

    def ops(self) -> tuple[OpContract, ...]:
        parameters = (
            OpParameter(name="x", role="activation"),
            OpParameter(name="weight", role="weight"),
            OpParameter(name="total", role="state", token_axis=None),
            OpParameter(name="slot", role="scalar"),
            OpParameter(name="out", role="output"),
            OpParameter(name="copy", role="output", is_exact=True),
        )
        return (
            OpContract(
                name="norm",
                parameters=parameters,
                regimes=("gaussian", "large"),
                implementations=self._implementations,
                files=("norm.py",),
            ),
        )

    def variants(self) -> tuple[Any, ...]:
        return ()

    def traffic(self, op: str, cell: Cell, experts_touched: int | None) -> tuple[int, int]:
        return cell.rows * WIDTH * 4, cell.rows * WIDTH * 4

    def launch_index(self, op: str) -> int:
        return 0

    def admits_op(self, op: str, cell: Cell) -> bool:
        if self.cheat.kind == "takes_everything":
            return True
        return (
            cell.arch == "cpu"
            and cell.tp == 1
            and cell.dcp == 1
            and cell.batch <= 8
            and cell.context <= 4096
            and cell.drafts <= 1
            and cell.rows <= 8
            and cell.phase != "mixed"
        )

    def make_args(
        self, op: str, cell: Cell, regime: str, seed: int, device: str, model: str
    ) -> dict[str, Any]:
        source = torch.Generator().manual_seed(seed)
        scale = 1000.0 if regime == "large" else 1.0
        rows = cell.rows
        return {
            "x": (torch.randn(rows, WIDTH, generator=source) * scale).bfloat16(),
            "weight": (torch.randn(WIDTH, generator=source) * 0.2 + 1.0).bfloat16(),
            "total": torch.randn(4, generator=source),
            "slot": 2,
            "out": torch.full((rows, WIDTH), torch.nan, dtype=torch.bfloat16),
            "copy": torch.full((rows, WIDTH), torch.nan, dtype=torch.bfloat16),
        }

    def touched(self, op: str, args: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        return {"total": torch.arange(4) == args["slot"]}

    def oracle(self, op: str, args: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        x = args["x"].double()
        total = args["total"].double()
        total[args["slot"]] += len(x)
        root = torch.sqrt(x.square().mean(1, keepdim=True) + EPS)
        return {"out": x / root * args["weight"].double(), "copy": args["x"], "total": total}

    def run_stock(self, op: str, args: Mapping[str, Any]) -> None:
        x = args["x"].float()
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        args["out"].copy_(normed.bfloat16() * args["weight"])
        args["copy"].copy_(args["x"])
        args["total"][args["slot"]] += len(x)

    def run_optimised(self, op: str, implementation: str, args: Mapping[str, Any], launches: Any) -> None:
        kind = self.cheat.kind
        self.cheat.calls += 1
        if kind == "stock_by_another_name":
            self.run_stock(op, args)
            launches[0] += 1
            return
        x, out = args["x"], args["out"]
        key = x.data_ptr()
        if kind == "cached_by_address" and key in self.cheat.kept:
            out.copy_(self.cheat.kept[key])
        else:
            norm = torch.linalg.vector_norm(x.float(), dim=1, keepdim=True)
            out[:] = x.float() * (WIDTH**0.5 / torch.sqrt(norm**2 + EPS * WIDTH)) * args["weight"].float()
            self.cheat.kept[key] = out.clone()
        args["copy"][:] = x
        args["total"].narrow(0, args["slot"], 1).add_(x.shape[0])
        if kind != "no_launch":
            launches[0] += 1
        self._spoil(kind, args)

    def bind_optimised(self, op: str, implementation: str, args: Mapping[str, Any], launches: Any) -> Any:
        return lambda: self.run_optimised(op, implementation, args, launches)

    def _spoil(self, kind: str, args: Mapping[str, Any]) -> None:
        out = args["out"]
        match kind:
            case "off_by_a_step":
                out.copy_(out.float() * 1.03)
            case "one_element":
                out[-1, -1] += 0.25
            case "swapped_rows":
                out.copy_(out.roll(1, 0))
            case "nan":
                out[0, 0] = torch.nan
            case "zeros":
                out.zero_()
            case "last_row_unwritten":
                out[-1].view(torch.int16).fill_(0x7FD3)
            case "writes_before":
                out.as_strided((1,), (1,), out.storage_offset() - 1).fill_(0)
            case "changes_input":
                args["x"][0, 0] += 1
            case "other_slot":
                args["total"][0] += 1
            case "copy_is_rounded":
                args["copy"].add_(0.01)
            case "scaled_by_the_batch":
                largest = args["x"].float().abs().amax()
                out.copy_(out.float() / largest * largest)
            case "dithered":
                is_hit = torch.rand(out.shape) < 0.1
                out.view(torch.int16).add_(is_hit.to(torch.int16))
            case "random":
                out.add_(torch.rand(out.shape) * 2e-3)
