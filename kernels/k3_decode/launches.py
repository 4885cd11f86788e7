"""How the host launches each kernel, read off the DSL's own host code before it is lowered.

Grids depend on the sizes of what a kernel is called with, so a dimension is kept as a formula: numbers,
`a<i>.<j>` (size j of argument i), `a<i>` (a number that is argument i) and the signs of `OPERATIONS`, in
postfix order with a space between, such as `a0.0 7 *`. What is not of that kind is None: unknown, never a
guess.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["Launch", "parse_launches"]

OPERATIONS: Mapping[str, str] = {
    "cute.tuple_add": "+", "cute.tuple_sub": "-", "cute.tuple_mul": "*", "cute.tuple_div": "/",
    "cute.tuple_mod": "%", "arith.addi": "+", "arith.subi": "-", "arith.muli": "*",
    "arith.divsi": "/", "arith.divui": "/", "arith.floordivsi": "/", "arith.remsi": "%",
    "arith.minsi": "min", "arith.maxsi": "max",
}  # fmt: skip
"""The DSL's arithmetic of sizes, which are never negative, by its sign in a formula."""
SAME = (
    "cute.to_int_tuple", "cute.get_scalars", "cute.make_int_tuple", "arith.extsi", "arith.extui",
    "arith.trunci", "arith.index_cast",
)  # fmt: skip
"""Operations that hand their only operand on."""
FUNCTION = re.compile(r"^\s*func\.func @\w+\(", re.MULTILINE)
STATEMENT = re.compile(r"^\s*((?:%[\w#]+(?:, )?)+) = ([\w.]+)(?: |\()(.*)$")
VALUE = re.compile(r"%[\w#]+")
LAUNCH = re.compile(
    r"(%[\w#]+) = cuda\.launch_cfg\.create.*?blockDim = \((%[\w#]+), (%[\w#]+), (%[\w#]+)\), "
    r"dynamicSmemBytes = (%[\w#]+), gridDim = \((%[\w#]+), (%[\w#]+), (%[\w#]+)\)"
)


class Launch(NamedTuple):
    """One launch as the compiler's own IR states it; None: no constant, or no known formula."""

    kernel: str
    is_dependent: bool
    """Whether programmatic stream serialisation is allowed, so that the kernel may start before its
    predecessor ends.
    """
    cluster: tuple[int, int, int]
    block: tuple[int | None, int | None, int | None]
    dynamic_shared_bytes: int | None
    grid: tuple[str | None, str | None, str | None]
    """Blocks along each axis, as formulas."""
    is_cooperative: bool
    """Whether all its blocks must fit on the GPU at once."""


def parse_launches(ir: str) -> tuple[Launch, ...]:
    """Launches in the DSL's cleaned host IR: grid configuration, its attributes and the kernel they belong
    to.
    """
    values = _values(ir)

    def number(name: str) -> int | None:
        formula = values.get(name)
        return int(formula) if formula is not None and re.fullmatch(r"-?\d+", formula) else None

    launches = []
    for config, bx, by, bz, shared, *grid in LAUNCH.findall(ir):
        at = re.escape(f"[{config}]")
        pdl = re.search(rf"programmatic_stream_serialization_allowed{at} (%[\w#]+)", ir)
        together = re.search(rf"launch_cfg\.cooperative{at} (%[\w#]+)", ir)
        cluster = re.search(rf"launch_cfg\.cluster_dim{at} \((%[\w#]+), (%[\w#]+), (%[\w#]+)\)", ir)
        kernel = re.search(rf"cuda\.launch_ex @kernels::@(\w+)<{re.escape(config)}>", ir)
        if kernel is None:
            continue
        dims = [number(v) or 1 for v in cluster.groups()] if cluster else [1, 1, 1]
        launches.append(
            Launch(
                kernel=kernel[1],
                is_dependent=pdl is not None and number(pdl[1]) != 0,
                cluster=(dims[0], dims[1], dims[2]),
                block=(number(bx), number(by), number(bz)),
                dynamic_shared_bytes=number(shared),
                grid=(values.get(grid[0]), values.get(grid[1]), values.get(grid[2])),
                is_cooperative=together is not None and number(together[1]) != 0,
            )
        )
    return tuple(launches)


def _values(ir: str) -> dict[str, str | None]:
    """Formulas of the values of the host function, by name."""
    values: dict[str, str | None] = {}
    start = FUNCTION.search(ir)
    host = ir[start.start() :] if start else ir
    head, _, _ = host.partition("{")
    for name, ordinal in re.findall(r"(%arg(\d+)): i(?:32|64)\b", head):
        values[name] = f"a{ordinal}"
    shapes: dict[str, tuple[str, ...]] = {}
    for line in host.splitlines():
        statement = STATEMENT.match(line)
        if statement:
            _take(VALUE.findall(statement[1]), statement[2], statement[3], values, shapes)
    return values


def _take(
    results: list[str],
    operation: str,
    rest: str,
    values: dict[str, str | None],
    shapes: dict[str, tuple[str, ...]],
) -> None:
    """Note what one statement gives. A result of several words has a place for each."""
    operands = VALUE.findall(rest.split(" : ")[0])
    if operation == "arith.constant":
        number = re.match(r"(-?\d+) : i(?:32|64)", rest)
        values[results[0]] = number[1] if number else None
    elif operation == "cute.get_layout":
        shapes[results[0]] = tuple(re.findall(r"%arg(\d+)", rest)[:1])
    elif operation == "cute.get_shape" and operands:
        argument = shapes.get(operands[0], ())
        leaves = re.search(r'-> !cute\.shape<"([^"]*)">', rest)
        if argument and leaves:
            shapes[results[0]] = _sizes(argument[0], leaves[1])
    elif operation == "cute.get_leaves" and operands:
        sizes = shapes.get(operands[0], ())
        if len(sizes) == len(results):
            values.update(zip(results, sizes, strict=True))
    elif operation == "cute.make_int_tuple" and not operands:
        constant = re.search(r'!cute\.int_tuple<"(-?\d+)">', rest)
        values[results[0]] = constant[1] if constant else None
    elif operation in SAME and len(operands) == 1 == len(results):
        values[results[0]] = values.get(operands[0])
    elif operation in OPERATIONS and len(operands) == 2:
        left, right = values.get(operands[0]), values.get(operands[1])
        known = left is not None and right is not None
        values[results[0]] = f"{left} {right} {OPERATIONS[operation]}" if known else None


def _sizes(argument: str, shape: str) -> tuple[str, ...]:
    """Sizes of an argument's shape as formulas, such as `(?{div=8},7168)`."""
    leaves = re.sub(r"\{[^}]*\}", "", shape).replace("(", "").replace(")", "").split(",")
    return tuple(leaf if leaf.isdigit() else f"a{argument}.{i}" for i, leaf in enumerate(leaves))
