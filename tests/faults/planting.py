"""How faults are planted: a few lines of a function changed, a function wrapped, an attribute replaced.

Everything is put back when the context ends. A function is recompiled under its own file's name, so that an
error inside a planted fault is the candidate's, as it would be in a real change.
"""

import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from typing import Any

from harness.domain.errors import InputError
from harness.domain.faults import FaultColumn, FaultTarget
from harness.domain.machine import Tier
from harness.faults.fault import Fault
from harness.faults.scenes import PatchScene

__all__ = [
    "FIRST", "FP8", "LONG", "LONGEST", "PATH_CHECK", "RANKS_CHECK", "VERIFY", "WIDE", "changed",
    "engine_fault", "kernel_checks", "op_fault", "replaced", "step_fault", "together", "wrapped",
]  # fmt: skip

FIRST = "cpu.tp1.dcp1.b3.c65.d0.bf16.decode"
"""The first cell of an op, which has every input regime."""
VERIFY = "cpu.tp1.dcp1.b3.c65.d7.bf16.verify"
LONG = "cpu.tp1.dcp1.b1.c200.d0.bf16.decode"
LONGEST = "cpu.tp1.dcp1.b1.c2100.d0.bf16.decode"
WIDE = "cpu.tp1.dcp1.b8.c65.d0.bf16.decode"
FP8 = "cpu.tp1.dcp1.b3.c65.d0.fp8.decode"
PATH_CHECK = "coverage/path/{arch}.tp1.dcp1.b2.c24.d0.bf16.decode"
RANKS_CHECK = "coverage/path/{arch}.tp2.dcp1.b2.c24.d0.bf16.decode"
Edit = Mapping[str, str]
"""Text of a function's source and what stands in its place."""


def kernel_checks(op: str, *cells: str) -> tuple[str, ...]:
    """Check ids of an op at the small model: its first cell, which has every regime, and others by label."""
    return tuple(f"kernels/{op}/nano/{cell}" for cell in (FIRST, *cells))


def op_fault(
    name: str,
    *,
    op: str,
    title: str,
    report: str,
    fault: Edit | Callable[..., None],
    repaired: Edit | Callable[..., None],
    function: str = "",
    cells: tuple[str, ...] = (),
    more: tuple[str, ...] = (PATH_CHECK,),
    **fields: Any,
) -> Fault:
    """A fault in the CPU implementation of an op: edits of a function's source, or a callable around the op
    that takes the sound op first and its arguments after.
    """
    target = f"k3_decode.cpu.{op}:{function or op}"

    def plant(is_repaired: bool) -> AbstractContextManager[None]:
        chosen = repaired if is_repaired else fault
        return wrapped(target, chosen) if callable(chosen) else changed(target, chosen)

    return Fault(
        name=name, title=title, report=report, target="op", expected=fields.pop("expected", "kernels"),
        scene=PatchScene(plant, (*kernel_checks(op, *cells), *more)), **fields,
    )  # fmt: skip


def engine_fault(
    name: str,
    *,
    title: str,
    report: str,
    at: str,
    fault: Edit | Callable[..., Any],
    repaired: Edit | Callable[..., Any],
    checks: tuple[str, ...],
    expected: FaultColumn = "coverage",
    target: FaultTarget = "engine",
    tier: Tier = Tier.SMOKE,
    gap: str = "",
    undo: Callable[[], object] = lambda: None,
) -> Fault:
    """A fault anywhere else: `at` is `module:function` or `module:Class.method`; `undo` follows the run."""

    @contextmanager
    def plant(is_repaired: bool) -> Iterator[None]:
        chosen = repaired if is_repaired else fault
        try:
            with wrapped(at, chosen) if callable(chosen) else changed(at, chosen):
                yield
        finally:
            undo()

    return Fault(name, title, report, target, expected, PatchScene(plant, checks), tier, gap)


def step_fault(
    name: str,
    *,
    title: str,
    report: str,
    fault: Callable[[Any], object],
    repaired: Callable[[Any], object],
    undo: Callable[[], object] = lambda: None,
    checks: tuple[str, ...] = ("coverage/state",),
) -> Fault:
    """What a fast step leaves behind: `fault(engine)` runs after each one, `undo()` when the run is over."""

    @contextmanager
    def plant(is_repaired: bool) -> Iterator[None]:
        leave = repaired if is_repaired else fault

        def step(sound: Callable[..., Any], engine: Any, *args: Any) -> Any:
            out = sound(engine, *args)
            leave(engine)
            return out

        try:
            with wrapped("k3_decode.engine:Engine._step", step):
                yield
        finally:
            undo()

    return Fault(name, title, report, "engine", "coverage", PatchScene(plant, checks))


@contextmanager
def changed(at: str, edits: Edit) -> Iterator[None]:
    """A function with some lines changed; raises `InputError` where a text is not there exactly once."""
    module, owner, name = _place(at)
    function = inspect.getattr_static(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    for before, after in edits.items():
        if source.count(before) != 1:
            raise InputError(
                f"{at} holds {before!r} {source.count(before)} times: bring the fault up to date"
            )
        source = source.replace(before, after)
    space = dict(vars(module))
    exec(compile(source, str(module.__file__), "exec"), space)  # the fault's own text
    with replaced(owner, name, space[name]):
        yield


@contextmanager
def wrapped(at: str, around: Callable[..., Any]) -> Iterator[None]:
    """A function called through `around(sound, *arguments)`."""
    _, owner, name = _place(at)
    sound = getattr(owner, name)

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return around(sound, *args, **kwargs)

    with replaced(owner, name, stand_in):
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute replaced for a while."""
    before = inspect.getattr_static(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def together(*contexts: AbstractContextManager[None]) -> Iterator[None]:
    """Several patches at once."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _place(at: str) -> tuple[Any, Any, str]:
    """(module, object that holds the function, its name there)."""
    path, _, inner = at.partition(":")
    module = import_module(path)
    *owners, name = inner.split(".")
    owner: Any = module
    for part in owners:
        owner = getattr(owner, part)
    return module, owner, name
