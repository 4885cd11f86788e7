"""What of this pack's kernels may be chosen: the spaces, what in them cannot be built, and how one is tried.

`row_product` is the form of kernel behind `projection` and `latent_tail` (and others of equal shape): its
tiling on sm_90a. On a CPU `mla_attend` widens so many pages at once, and `experts` decides from which waste
on it multiplies expert by expert. What was chosen lies in `tuned/`; this module writes nothing there.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from k3_decode.ops.contract import Cell
from k3_decode.shapes import RankShapes
from k3_decode.tuned import TableError, choice, configured, read_table, source_of, tables

__all__ = ["Space", "build", "check_tables", "floor_us", "refused", "space_of", "tried", "tuned_words"]

ROW_PRODUCT = "row_product"
ARCH = "sm_90a"
"""Where `row_product` was measured; elsewhere it takes what is built in."""
SHARED_BYTES = 227 * 1024
"""Shared memory that a block may have on sm_90a, 228 KB a multiprocessor less 1 KB for the system."""
REGISTERS = 65536
"""Of a multiprocessor."""
OTHER_REGISTERS = 40
"""Of a thread, for addresses and the like: less was never seen in this kernel's audits."""
LATENCY_US = 0.5
"""A load from DRAM on an idle device takes at least that long, so bytes in flight bound the rate."""
AXES: tuple[tuple[str, tuple[int, ...], str], ...] = (
    ("row_tiles", (1, 2, 3, 4), "tiles of 8 rows a warp owns"),
    ("row_warps", (1, 2, 4, 8), "warps of a block along the rows"),
    ("k_warps", (1, 2, 4, 7, 8, 16), "warps of a block along K"),
    ("cluster", (1, 2, 3, 4, 6, 8), "blocks that divide K"),
    ("depth", (4, 6, 8, 10, 12, 16), "steps (of warpgroups: stages) of weights in flight"),
    ("blocks_per_sm", (1, 2, 4), "blocks on one multiprocessor"),
    ("is_grouped", (0, 1), "whether warpgroups multiply"),
)


class Space(NamedTuple):
    """The choices of one kernel at one shape, in plain data."""

    kernel: str
    shape: dict[str, int]
    near: tuple[str, ...]
    axes: tuple[tuple[str, tuple[int, ...], str], ...]
    incumbent: dict[str, int]


def space_of(op: str, implementation: str, cell: Cell) -> Space | None:
    """The choices of an op in a cell; None where there are none."""
    if implementation == "cpu":
        return _cpu_space(op, cell)
    if implementation == "cute" and op in ("projection", "latent_tail"):
        return _row_product_space(op, cell)
    return None


def refused(kernel: str, shape: Mapping[str, int], values: Mapping[str, int]) -> str:
    """Why a configuration cannot be built or launched; empty where it can."""
    if kernel != ROW_PRODUCT:
        return ""
    from k3_decode.cute.row_plan import shared_layout

    try:
        plan = _plan(shape, values)
    except ValueError as error:
        return str(error)
    if plan.tokens != shape["tokens"]:
        return f"no launch asks for {shape['tokens']} tokens of that shape, but for {plan.tokens}"
    if not 64 <= plan.threads <= 512:
        return f"{plan.threads} threads a block"
    parts, pieces = plan.parts, plan.k // (64 if plan.is_grouped else 32)
    if pieces < parts or plan.depth > -(-pieces // parts):
        return f"{plan.depth} steps in flight of {pieces} over {parts} slices"
    bytes_ = shared_layout(plan).size
    if (bytes_ + 1024) * plan.blocks_per_sm > SHARED_BYTES + 1024:
        return f"{bytes_} bytes of shared memory for {plan.blocks_per_sm} blocks"
    held = plan.tokens // 2 if plan.is_grouped else plan.row_tiles * (4 * plan.depth + 2 * plan.halves)
    if (held + OTHER_REGISTERS) * plan.threads * plan.blocks_per_sm > REGISTERS or held > 200:
        return f"{held} registers a thread for weights and sums alone"
    return ""


def check_tables(*, is_built: bool) -> None:
    """Read every tuned table whole; raises `TableError` where one holds what no kernel takes, or, with
    `is_built` and the compiler here, what cannot be built.
    """
    for file in tables():
        for entry in read_table(file):
            shape, values = dict(entry["shape"]), dict(entry["configuration"])
            if not is_built or find_spec("cutlass") is None:
                continue
            if why := refused(entry["kernel"], shape, values):
                at = " ".join(f"{name} {value}" for name, value in shape.items())
                raise TableError(
                    f"{file}: what it chooses for {entry['kernel']} at {at} cannot be built: {why}; tune "
                    "that shape again, or remove the entry"
                )


def floor_us(
    kernel: str, shape: Mapping[str, int], values: Mapping[str, int], moved: int, gb_per_s: float
) -> float:
    """Least microseconds of one call: bytes over the ceiling, or over what is kept in flight."""
    ceiling = moved / gb_per_s / 1e3
    if kernel != ROW_PRODUCT:
        return ceiling
    from k3_decode.cute.plans import MULTIPROCESSORS

    plan = _plan(shape, values)
    step = (
        (plan.group_rows * 128) if plan.is_grouped else plan.row_warps * plan.k_warps * plan.row_tiles * 512
    )
    blocks = -(-shape["rows"] // plan.group_rows) * plan.cluster
    resident = min(blocks, MULTIPROCESSORS * plan.blocks_per_sm)
    in_flight = resident * step * plan.depth
    return max(ceiling, float(shape["rows"] * shape["k"] * 2 / in_flight * LATENCY_US))


@contextmanager
def tried(arch: str, kernel: str, shape: Mapping[str, int], values: Mapping[str, int]) -> Iterator[None]:
    """Inside the block, launches at `shape` take the configuration."""
    with configured(arch, kernel, shape, values):
        yield


def build(
    op: str, kernel: str, shape: Mapping[str, int], choices: Sequence[Mapping[str, int]], folder: Path,
    processes: int,
) -> None:  # fmt: skip
    """Compile configurations into `folder`, several at once; nothing to do for what is not compiled."""
    if kernel != ROW_PRODUCT:
        return
    from k3_decode.kernel_objects import Form, build_objects

    more: dict[str, tuple[Any, ...]] = {"projection": (False,), "latent_tail": (1,)}
    module = f"k3_decode.cute.{op}"
    forms = [Form(module, "compile_plan", (_plan(shape, values), *more[op])) for values in choices]
    build_objects(forms, folder, processes)


@lru_cache(maxsize=1024)
def tuned_words(implementation: str, shapes: RankShapes, requests: int, rows: int) -> str:
    """Kernels of a step that take a tuned choice, each with where it comes from; empty where none does."""
    model, tokens = shapes.model, requests * rows
    if implementation == "cpu":
        arch = "cpu"
        asked = [
            ("experts", {"experts": model.experts, "top_k": model.top_k, "tokens": tokens}),
            ("mla_attend", {"queries": rows * shapes.heads}),
        ]
    else:
        from k3_decode.cute.plans import capacity

        arch = ARCH
        products = ((shapes.kda_in_rows, model.hidden), (model.hidden, model.latent))
        asked = [(ROW_PRODUCT, {"rows": m, "k": k, "tokens": capacity(m, k, tokens)}) for m, k in products]
    sources = [(kernel, source_of(arch, kernel, shape)) for kernel, shape in asked]
    return "; ".join(f"{kernel} {source}" for kernel, source in sources if source != "built-in")


def _plan(shape: Mapping[str, int], values: Mapping[str, int]) -> Any:
    from k3_decode.cute.plans import plan_for

    with configured(ARCH, ROW_PRODUCT, shape, values):
        return plan_for(shape["rows"], shape["k"], shape["tokens"], True)


def _row_product_space(op: str, cell: Cell) -> Space | None:
    from k3_decode.cute.plans import capacity, plan_for

    model = cell.shapes.model
    rows, k = (cell.shapes.kda_in_rows, model.hidden) if op == "projection" else (model.hidden, model.latent)
    if not 1 <= cell.tokens <= 64:
        return None
    shape = {"rows": rows, "k": k, "tokens": capacity(rows, k, cell.tokens)}
    plan = plan_for(rows, k, cell.tokens, True)
    incumbent = {name: int(getattr(plan, name)) for name, _, _ in AXES}
    axes = tuple((n, tuple(sorted({*values, incumbent[n]})), m) for n, values, m in AXES)
    return Space(ROW_PRODUCT, shape, (), axes, incumbent)


def _cpu_space(op: str, cell: Cell) -> Space | None:
    if op == "mla_attend":
        from k3_decode.cpu.mla_attend import PAGES_AT_ONCE

        shape = {"queries": cell.rows * cell.shapes.heads}
        axis = ("pages_at_once", (1, 2, 4, 8, 16, 32, 64), "pages widened together")
        return _one_axis(op, shape, ("queries",), axis, PAGES_AT_ONCE)
    if op == "experts":
        from k3_decode.cpu.experts import MOST_WASTE

        model = cell.shapes.model
        shape = {"experts": model.experts, "top_k": model.top_k, "tokens": cell.tokens}
        axis = ("most_waste", (0, 1, 2, 4, 8, 16, 64), "row-expert pairs computed for each one that counts")
        return _one_axis(op, shape, ("tokens",), axis, MOST_WASTE)
    return None


def _one_axis(
    kernel: str, shape: dict[str, int], near: tuple[str, ...], axis: tuple[str, tuple[int, ...], str],
    built_in: int,
) -> Space:  # fmt: skip
    found = choice("cpu", kernel, shape)
    incumbent = built_in if found is None else found.values[axis[0]]
    axis = (axis[0], tuple(sorted({*axis[1], incumbent})), axis[2])
    return Space(kernel, shape, near, (axis,), {axis[0]: incumbent})
