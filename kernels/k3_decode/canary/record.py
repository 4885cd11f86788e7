"""Record what the ops read in real steps, for the input regime `recorded`.

`python -m k3_decode.canary.record` writes the file beside the ops.

Two sources. The canary decodes real prompts on the optimised path, and every op's activations are kept. One
layer of the claimed model's shapes at TP16, with drawn weights, gives rows of the real width: each op reads
what the op before it wrote. No values of users or of anybody's data are among them.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy
import torch

from k3_decode import engine as serving
from k3_decode.canary.tasks import mrcr_samples
from k3_decode.op_table import OpTable, load_ops
from k3_decode.ops import OPS
from k3_decode.ops.contract import Cell, Role
from k3_decode.ops.recorded import FILE
from k3_decode.session import ModelSession, SessionSpec
from k3_decode.shapes import K3

__all__ = ["canary_rows", "main", "slice_rows"]

ROWS, SLICE_ROWS, MAX_WIDTH = 24, 4, 7168
STEPS, PROMPTS, PROMPT_TOKENS = 8, 4, 256
SEED = 20261130
TP = 16
Kept = dict[str, list[torch.Tensor]]


def canary_rows() -> dict[str, torch.Tensor]:
    """[rows, width] of each `op.parameter`, spread over layers and steps of the canary."""
    kept: Kept = {}
    samples = mrcr_samples(SEED, PROMPTS, PROMPT_TOKENS)
    spec = SessionSpec(
        model="canary", implementation="cpu", is_on=True, tp=1, max_requests=PROMPTS,
        max_context=PROMPT_TOKENS + 64, drafts=0, kv_dtype="bf16", seed=SEED,
    )  # fmt: skip
    with mock.patch.object(serving, "load_ops", lambda *args: _listening(load_ops(*args), kept)):
        session = ModelSession(spec)
    requests, scores = session.prefill([sample.prompt for sample in samples])
    for _ in range(STEPS):
        scores = session.decode(requests, scores.argmax(-1).tolist())
    session.close()
    return {name: _some(_alike(rows), ROWS) for name, rows in kept.items()}


def slice_rows() -> dict[str, torch.Tensor]:
    """The same of one rank of the claimed model, each op fed by the one before it."""
    cell = Cell(K3.rank(TP), SLICE_ROWS, 1, 512, "bf16")
    source = torch.Generator().manual_seed(SEED)
    kept: dict[str, torch.Tensor] = {}

    def run(op: str, regime: str = "gaussian", **given: torch.Tensor) -> dict[str, Any]:
        args = OPS[op].make_args(cell, regime, source, torch.device("cpu")) | given
        kept.update({f"slice/{name}": rows for name, rows in _activations(op, args)})
        OPS[op].stock(**args)
        return args

    x = run("attn_res")["out"]
    packed = run("projection", x=x)["out"]
    core = run("kda_step", packed=packed)["out"]
    attended = run("projection", "output_projection", x=core)["out"]
    x = run("attn_res", delta=attended)["out"]
    query = run("mla_query", packed=run("projection", "mla_in", x=x)["out"])
    pages = {"query": query["query"]}
    partial = run("mla_attend", **pages)["out"]
    shards = partial.unsqueeze(0).repeat(4, 1, 1, 1)
    run("mla_value", partial=shards)
    front = run("moe_front", x=x)
    run("router", logits=front["logits"])
    shared = run("situ_mlp", x=x)["out"]
    kept["slice/experts.latent"] = front["latent"]
    run("latent_tail", latent=front["latent"], shared=shared)
    return {name: _some(rows, SLICE_ROWS) for name, rows in kept.items()}


def main(argv: list[str] | None = None) -> int:
    """Write the file anew."""
    argparse.ArgumentParser(prog="python -m k3_decode.canary.record", description=__doc__).parse_args(argv)
    torch.set_num_threads(1)
    with torch.no_grad():
        found = {f"canary/{name}": rows for name, rows in canary_rows().items()} | slice_rows()
    numpy.savez_compressed(FILE, **{name: _stored(rows) for name, rows in sorted(found.items())})  # type: ignore[arg-type]  # its keywords are arrays
    sys.stdout.write(f"{FILE.name}: {len(found)} arrays, {FILE.stat().st_size} bytes\n")
    return 0


def _listening(table: OpTable, kept: Kept) -> OpTable:
    """The table with every op's activations copied before it runs."""

    def heard(op: str, run: Callable[..., None]) -> Callable[..., None]:
        def listen(**arguments: Any) -> None:
            for name, rows in _activations(op, arguments):
                kept.setdefault(name, []).append(rows.clone())
            run(**arguments)

        return listen

    return {
        op: replace(entry, run=heard(op, entry.run)) if op in OPS else entry for op, entry in table.items()
    }


def _activations(op: str, args: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Rows of every floating activation and of state that a step reads as one."""
    found = []
    for parameter in OPS[op].params:
        value = args.get(parameter.name)
        is_read = parameter.role is Role.ACTIVATION or (op, parameter.name) in (
            ("attn_res", "prefix"), ("attn_res", "blocks"),
        )  # fmt: skip
        if is_read and isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float32):
            rows = value.detach().reshape(-1, value.shape[-1])[:, :MAX_WIDTH]
            clean = rows[rows.isfinite().all(1) & (rows != 0).any(1)]
            if len(clean):
                found.append((f"{op}.{parameter.name}", clean))
    return found


def _alike(parts: list[torch.Tensor]) -> torch.Tensor:
    """All parts that are as wide as the first: an op serves several widths."""
    return torch.cat([part for part in parts if part.shape[1] == parts[0].shape[1]])


def _some(rows: torch.Tensor, count: int) -> torch.Tensor:
    """`count` rows at equal distances."""
    places = torch.linspace(0, len(rows) - 1, min(count, len(rows))).long()
    return rows[places]


def _stored(rows: torch.Tensor) -> numpy.ndarray[Any, Any]:
    whole = rows.contiguous()
    return (whole.view(torch.int16) if whole.dtype is torch.bfloat16 else whole).numpy()


if __name__ == "__main__":
    sys.exit(main())
