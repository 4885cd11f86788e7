"""Device code of one kernel for several GPU architectures, from one trace, with no GPU and no host part.

The DSL traces a kernel's Python into MLIR and lowers that for one architecture, together with host code that
loads and launches it. Tracing takes longer than lowering, and the trace of a kernel that does not ask for
its architecture is the same for all. So here the DSL traces once and stops where it would lower; the kernels
are then lowered for each architecture, and the host function is read for its launches alone. Invariant:
PTX and cubin are byte for byte those that the DSL itself makes for that architecture in a process of its own
(`tests/k3_decode/test_device_code.py`); a kernel that does ask is traced for each architecture anew.
"""

import importlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from k3_decode.launches import Launch, parse_launches

__all__ = ["DeviceCode", "device_code"]

CHIP = re.compile(r"\bcubin-chip=\w+")
DUMP = re.compile(r"\bdump-(ptx|cubin)-path='[^']*'")
KERNELS = "gpu.module"
HARMLESS = frozenset({"generate_launch_op", "check_arch", "_is_supported_arch"})
"""Functions of the DSL that ask for the architecture: for host code alone, and to refuse it."""


class DeviceCode(NamedTuple):
    """What one kernel became for one architecture."""

    ptx: str
    cubin: bytes
    launches: tuple[Launch, ...]
    """How its host launches it, the same for every architecture of a trace."""


@dataclass(slots=True)
class _Trace:
    """One run of the DSL: what it is for, and what came of it."""

    architectures: tuple[str, ...]
    dump: Path
    is_particular: bool = False
    """Whether the kernel's Python asked which architecture it is for."""
    launches: tuple[Launch, ...] = ()
    errors: dict[str, str] = field(default_factory=dict)


class _TracedError(Exception):
    """Ends the DSL's own compilation, where all that is wanted of it is there."""


def device_code(
    build: Callable[[], object], architectures: Sequence[str], dump: Path
) -> dict[str, DeviceCode | str]:
    """Runs `build`, which compiles one kernel with the DSL; gives for each architecture its code, or its
    error in words. `dump` is a folder for files that are gone afterwards. Raises what `build` raises.
    """
    trace = _traced(build, architectures, dump)
    if trace.is_particular and len(architectures) > 1:
        for path in dump.iterdir():
            path.unlink()
        return {a: found for a in architectures for found in device_code(build, (a,), dump).values()}
    return {a: _taken(trace, a) for a in architectures}


def _traced(build: Callable[[], object], architectures: Sequence[str], dump: Path) -> _Trace:
    """Trace once and lower for each architecture."""
    trace = _Trace(tuple(architectures), dump)
    with _stopped_at_lowering(trace):
        try:
            build()
        except _TracedError:
            return trace
    raise RuntimeError("nothing was lowered: the kernel was compiled before, or not by this compiler")


def _taken(trace: _Trace, architecture: str) -> DeviceCode | str:
    """What was dumped for an architecture, whose files are then removed."""
    if architecture in trace.errors:
        return trace.errors[architecture]
    ptx, cubin = (trace.dump / f"kernel.{architecture}.{kind}" for kind in ("ptx", "cubin"))
    if not (ptx.exists() and cubin.exists()):
        return "RuntimeError: the compiler kept neither PTX nor cubin"
    code = DeviceCode(ptx.read_text(), cubin.read_bytes(), trace.launches)
    ptx.unlink()
    cubin.unlink()
    return code


@contextmanager
def _stopped_at_lowering(trace: _Trace) -> Iterator[None]:
    """Inside the block the DSL traces for the first architecture, and `_lower` does the rest."""
    cute: Any = importlib.import_module("cutlass.cute")
    compiler: Any = importlib.import_module("cutlass.base_dsl.compiler").Compiler
    base: Any = importlib.import_module("cutlass.base_dsl")
    dsl: Any = base.BaseDSL
    kept = cute.compile, compiler.compile, dsl.get_arch_enum, dsl.check_arch
    compile_, _, architecture_of, check = kept
    own_folder = Path(str(base.__file__)).resolve().parents[1]

    def for_the_first(function: object, *arguments: object, options: str = "", **rest: object) -> object:
        options = f"{options} --gpu-arch {trace.architectures[0]}"
        return compile_(function, *arguments, options=options, no_jit_engine=True, **rest)

    def lower_for_all(self: Any, module: Any, pipeline: str, *_: object, **__: object) -> object:
        _lower(trace, self.passmanager.PassManager, module, pipeline)
        raise _TracedError

    def noted(self: Any) -> object:
        code = sys._getframe(1).f_code
        is_of_the_dsl = Path(code.co_filename).resolve().is_relative_to(own_folder)
        trace.is_particular |= not is_of_the_dsl or code.co_name not in HARMLESS
        return architecture_of(self)

    def checked(self: Any, criterion: Callable[[Any], bool]) -> None:
        check(self, criterion)
        others = (base.Arch.from_string(name) for name in trace.architectures)
        trace.is_particular |= not all(criterion(other) for other in others)

    cute.compile, compiler.compile, dsl.get_arch_enum, dsl.check_arch = (
        for_the_first, lower_for_all, noted, checked,
    )  # fmt: skip
    try:
        yield
    finally:
        cute.compile, compiler.compile, dsl.get_arch_enum, dsl.check_arch = kept


def _lower(trace: _Trace, manager: Any, module: Any, pipeline: str) -> None:
    """Lower a traced module's kernels for every architecture, and read its launches."""
    if not CHIP.search(pipeline) or {m[1] for m in DUMP.finditer(pipeline)} != {"ptx", "cubin"}:
        raise RuntimeError(f"this compiler names no chip or keeps no files: {pipeline[:500]}")
    host = _without(module, lambda name: name == KERNELS)
    cleaning = manager.parse("builtin.module(canonicalize,cse)")
    cleaning.enable_verifier(False)  # its kernels are gone
    cleaning.run(host)
    trace.launches = parse_launches(host.get_asm(assume_verified=True))
    for number, architecture in enumerate(trace.architectures):
        own = CHIP.sub(f"cubin-chip={architecture}", pipeline)
        own = DUMP.sub(lambda m: f"dump-{m[1]}-path='{trace.dump / 'kernel'}'", own)
        passes = manager.parse(own)
        passes.enable_verifier(number == 0)  # after each pass; the passes are the same for all
        try:
            passes.run(_without(module, lambda name: name != KERNELS))
        except Exception as error:  # noqa: BLE001  # whatever the compiler raises is a fact about the kernel
            trace.errors[architecture] = f"{type(error).__name__}: {error}"


def _without(module: Any, is_left_out: Callable[[str], bool]) -> Any:
    """A copy of a module without some of its top operations."""
    copy = module.operation.clone()
    for operation in list(copy.regions[0].blocks[0].operations):
        if is_left_out(operation.operation.name):
            operation.operation.erase()
    return copy
