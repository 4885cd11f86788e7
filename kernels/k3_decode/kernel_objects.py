"""Compiled kernels as object files: what one process compiled, the next one loads in milliseconds.

A kernel's form (its module, and the arguments of its memoised compile function) and the text of its modules
name its object, so that an edit never meets an old binary. Forms are found by running a step with
recorders in place of launches, and compiled by several processes at once.
"""

import hashlib
import importlib
import logging
import os
import pkgutil
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

__all__ = ["Form", "build_objects", "recorded_forms", "use_objects"]

COMPILERS = ("_compile", "compile_plan", "_compile_merge", "launch_wide")
"""Names of the memoised functions that compile a form, one or more in a kernel module; a module may have
another's by import."""
MULTIPROCESSORS = 132
"""Of an H200: what a recorded step takes the device for."""


@dataclass(frozen=True, slots=True)
class Form:
    """One compiled kernel: where its compile function is, and the constants that it is given."""

    module: str
    function: str
    arguments: tuple[Any, ...]

    def file_name(self) -> str:
        """Names the object by form, kernel sources and architecture."""
        arch = os.environ.get("CUTE_DSL_ARCH")
        text = f"{self.module}.{self.function}{self.arguments!r}{arch}{_sources(self.module)}"
        return f"{self.module.rpartition('.')[2]}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.o"


@contextmanager
def recorded_forms() -> Iterator[list[Form]]:
    """Collects the forms that launches inside the block ask for; nothing is compiled or launched."""
    found: list[Form] = []

    def recorder(module: str, name: str, _original: Callable[..., Any]) -> Callable[..., Any]:
        def record(*arguments: Any) -> Callable[..., None]:
            form = Form(module, name, arguments)
            if form not in found:
                found.append(form)
            return lambda *_, **__: None

        return record

    plans = importlib.import_module("k3_decode.cute.plans")
    with _replaced(recorder), _as_an_h200(plans):
        yield found


def build_objects(forms: Sequence[Form], folder: Path, processes: int) -> None:
    """Compiles what `folder` does not hold yet."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [form for form in forms if not (folder / form.file_name()).exists()]
    if not missing:
        return
    workers = min(processes, len(missing))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(_build, missing, [folder] * len(missing)))


@contextmanager
def use_objects(folder: Path) -> Iterator[None]:
    """Inside the block launches load their kernels from `folder`, and compile what it does not hold."""

    def loader(module: str, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @cache
        def load(*arguments: Any) -> Callable[..., None]:
            path = folder / Form(module, name, arguments).file_name()
            if not path.exists():
                logging.getLogger(__name__).info("compiling %s.%s%r", module, name, arguments)
                launch: Callable[..., None] = original(*arguments)
                return launch
            return _loaded(path)

        return load

    with _replaced(loader):
        yield


def _build(form: Form, folder: Path) -> None:
    compiled = getattr(importlib.import_module(form.module), form.function)(*form.arguments)
    path = folder / form.file_name()
    part = path.with_suffix(f".{os.getpid()}.o")
    compiled.export_to_c(str(part), function_name=_symbol(path))
    part.rename(path)


@cache
def _loaded(path: Path) -> Callable[..., None]:
    """The launch in an object file, loaded once a process: many sessions use the same ones."""
    from cutlass.cute.runtime import load_module

    launch: Callable[..., None] = getattr(load_module(str(path), enable_tvm_ffi=True), _symbol(path))
    return launch


def _symbol(path: Path) -> str:
    return path.stem.replace("-", "_")


@contextmanager
def _replaced(wrap: Callable[[str, str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Every kernel module's compile functions behind `wrap(module, name, original)`, for a while."""
    kept = []
    for name in _kernel_modules():
        module = importlib.import_module(name)
        for function in COMPILERS:
            original = getattr(module, function, None)
            if original is not None and original.__module__ in _kernel_modules():
                kept.append((module, function, original))
                setattr(module, function, wrap(original.__module__, function, original))
    try:
        yield
    finally:
        for module, function, original in kept:
            setattr(module, function, original)


@contextmanager
def _as_an_h200(plans: Any) -> Iterator[None]:
    """Kernel modules take the device for an H200, whatever there is."""
    ring: Any = importlib.import_module("k3_decode.cute.ring")
    kept = []
    for name in _kernel_modules():
        module = importlib.import_module(name)
        for attribute, value in (
            ("has_warpgroups", lambda: True),
            ("multiprocessors", lambda _device: MULTIPROCESSORS),
        ):
            original = getattr(module, attribute, None)
            if original is not None and module not in (ring, plans):
                kept.append((module, attribute, original))
                setattr(module, attribute, value)
    kept += [(ring, "multiprocessors", ring.multiprocessors), (plans, "has_warpgroups", plans.has_warpgroups)]
    ring.multiprocessors, plans.has_warpgroups = (lambda _device: MULTIPROCESSORS), (lambda: True)
    try:
        yield
    finally:
        for module, attribute, original in kept:
            setattr(module, attribute, original)


@cache
def _kernel_modules() -> tuple[str, ...]:
    package = importlib.import_module("k3_decode.cute")
    return tuple(f"{package.__name__}.{found.name}" for found in pkgutil.iter_modules(package.__path__))


@cache
def _sources(module: str) -> str:
    """Digest of the text of a kernel module and of every kernel module that it imports, and of the compiler's
    version."""
    from importlib.metadata import PackageNotFoundError, version

    found, wanted = dict[str, bytes](), [module]
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        found[name] = Path(importlib.import_module(name).__file__ or "").read_bytes()
        wanted += [other for other in _kernel_modules() if _imports(found[name].decode(), other)]
    digest = hashlib.sha256()
    for name in sorted(found):
        digest.update(found[name])
    try:
        digest.update(version("nvidia-cutlass-dsl").encode())
    except PackageNotFoundError:
        digest.update(str(importlib.import_module("cutlass").__version__).encode())
    return digest.hexdigest()


def _imports(text: str, module: str) -> bool:
    package, _, name = module.rpartition(".")
    return (
        re.search(rf"from {re.escape(module)} import|from {re.escape(package)} import .*\b{name}\b", text)
        is not None
    )
