"""Compile kernel variants in a process of its own, with no GPU and no driver.

`python -m k3_decode.compile --arch sm_90a --arch sm_100a --out DIR NAME...` leaves in `DIR/<architecture>`
`<name>.ptx`, `<name>.cubin`, `<name>.sass` (where a disassembler is installed) and `<name>.json` for each
variant that names the architecture. The JSON file is written last and by rename, so where it exists the
others are whole. Invariant: cutlass is imported after its environment is set, as the DSL keeps it for the
life of a process. A variant that does not compile leaves a JSON file with its error; the exit code is then 1.
What the process does to the compiler to be quick (`device_code`, `_hurry`) changes no byte of PTX or cubin.
"""

import argparse
import gc
import importlib
import json
import os
import pkgutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from k3_decode.cute.variant import Variant
from k3_decode.device_code import DeviceCode, device_code
from k3_decode.disassembly import DisassemblyError, disassemble, find_disassembler
from k3_decode.environment_reads import noted_reads

__all__ = ["all_variants", "compile_variants", "find_disassembler", "main"]

EXIT_FAILED = 1
ROOT = Path(__file__).resolve().parent
TOGETHER = 32
"""Variants disassembled at once: starting the disassembler takes longer than reading ten cubins."""
PARENT_POLL_S = 2.0


def all_variants() -> tuple[Variant, ...]:
    """Variants of every module under `cute/` that has `variants()`, in module order."""
    package = importlib.import_module("k3_decode.cute")
    found: list[Variant] = []
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda i: i.name):
        module = importlib.import_module(f"k3_decode.cute.{info.name}")
        if hasattr(module, "variants"):
            found += module.variants()
    return tuple(found)


def compile_variants(
    variants: Sequence[Variant],
    architectures: Sequence[str],
    out: Path,
    dump: Path,
    reads: Sequence[str] = (),
) -> dict[tuple[str, str], str | None]:
    """Compile variants into `out/<architecture>`, each for those architectures that it names; gives its error
    in words, or None, by name and architecture. `dump` is an empty folder for the DSL; `reads` says what
    of the environment was read when they were imported, which fails them all.
    """
    records = [r for variant in variants for r in _compile(variant, architectures, out, dump, reads)]
    for architecture in architectures:
        folder = out / architecture
        compiled = [r for r in records if r["architecture"] == architecture and r["error"] is None]
        texts = _disassemble(folder, [r["variant"] for r in compiled])
        for record, missing in zip(compiled, texts, strict=True):
            record["sass_missing"] = missing
    for record in records:
        folder = out / record["architecture"]
        partial = folder / f"{record['variant']}.json.part"
        partial.write_text(json.dumps(record))
        partial.replace(folder / f"{record['variant']}.json")
    return {(record["variant"], record["architecture"]): record["error"] for record in records}


def main(argv: list[str] | None = None) -> int:
    """Compile the named variants (default: all that name an architecture asked for); 1 when one failed."""
    parser = argparse.ArgumentParser(prog="python -m k3_decode.compile", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--arch", required=True, action="append", help="sm_90a, sm_100a or sm_103a; may be repeated"
    )
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args(argv)
    for architecture in asked.arch:
        (asked.out / architecture).mkdir(parents=True, exist_ok=True)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="cute-dump-") as folder:
        os.environ |= {
            "CUTE_DSL_ARCH": asked.arch[0],
            "CUTE_DSL_KEEP": "ptx,cubin",
            "CUTE_DSL_DUMP_DIR": folder,
            "CUTE_DSL_LINEINFO": "1",
            "CUTE_DSL_NO_CACHE": "1",
        }
        if argv is None:
            _hurry()
        with noted_reads(ROOT / "cute") as reads:
            known = {v.name: v for v in all_variants() if set(asked.arch) & set(v.architectures)}
        names = asked.names or sorted(known)
        unknown = [n for n in names if n not in known]
        if unknown:
            parser.error(
                f"{', '.join(asked.arch)}: no variants {', '.join(unknown)}; "
                f"known: {', '.join(sorted(known))}"
            )
        failed = False
        for start in range(0, len(names), TOGETHER):
            gc.collect()  # it never runs by itself (`_hurry`)
            part = [known[name] for name in names[start : start + TOGETHER]]
            ended = compile_variants(part, asked.arch, asked.out, Path(folder), reads)
            for (name, architecture), error in ended.items():
                failed |= error is not None
                sys.stderr.write(f"{name} {architecture}: {error or 'compiled'}\n")
    return EXIT_FAILED if failed else 0


def _compile(
    variant: Variant, architectures: Sequence[str], out: Path, dump: Path, reads: Sequence[str]
) -> list[dict[str, Any]]:
    """Compile one variant; gives its record for each architecture."""
    wanted = [a for a in architectures if a in variant.architectures]
    begun = time.perf_counter()
    found: dict[str, DeviceCode | str]
    try:
        with noted_reads(ROOT) as own:
            found = device_code(variant.compile, wanted, dump)
    except Exception as error:  # noqa: BLE001  # whatever the compiler raises is a fact about the variant
        found = dict.fromkeys(wanted, f"{type(error).__name__}: {error}")
    if told := [*reads, *own]:
        said = f"{'; '.join(told)}: elsewhere it would be other code than what is read here; pass a constant"
        found = dict.fromkeys(wanted, said)
    spent = round((time.perf_counter() - begun) / max(1, len(wanted)), 3)
    return [_record(variant, architecture, code, out, spent) for architecture, code in found.items()]


def _record(
    variant: Variant, architecture: str, code: DeviceCode | str, out: Path, spent_s: float
) -> dict[str, Any]:
    """What is said of one variant for one architecture, whose code is written."""
    record: dict[str, Any] = {
        "variant": variant.name,
        "op": variant.op,
        "architecture": architecture,
        "error": None,
        "launches": [],
        "compile_s": spent_s,
    }
    if isinstance(code, str):
        return record | {"error": code[:2000]}
    (out / architecture / f"{variant.name}.ptx").write_text(code.ptx)
    (out / architecture / f"{variant.name}.cubin").write_bytes(code.cubin)
    return record | {"launches": [launch._asdict() for launch in code.launches]}


def _hurry() -> None:
    """Make the compiler of this process quick. Without torch, which the DSL's binding imports where it finds
    it and nothing here needs, a process starts 2 s earlier; looking for garbage takes a tenth of the time,
    and there is next to none: 2 MiB after seven kernels. The rest is below.
    """
    gc.disable()
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # the documented way to bar an import
    operations: Any = importlib.import_module("cutlass._mlir_helpers.op")
    _remember(operations, "_fast_frameinfo", lambda frame: (frame.f_code, frame.f_lasti))
    _remember(operations, "_is_framework_stack_frame", lambda frame: (frame.f_code, 0))
    _remember(operations, "_CO_POSITIONS", lambda code: (code, 0), lambda positions: tuple(positions))


def _remember(
    module: Any,
    name: str,
    key_of: Callable[[Any], tuple[CodeType, int]],
    kept: Callable[[Any], Any] = lambda found: found,
) -> None:
    """Have the DSL look up once what it asks of the stack for each operation that it builds: a place's source
    line, whether code is its own, and the places of a code object, which it walks through from the start.
    """
    look_up = getattr(module, name, None)
    if look_up is None:
        return  # another version of the DSL: slower, not different
    known: dict[tuple[int, int], tuple[Any, CodeType]] = {}

    def remembered(asked: Any) -> Any:
        code, place = key_of(asked)
        key = (id(code), place)
        if key not in known:
            known[key] = kept(look_up(asked)), code  # holding the code keeps its id from being used again
        return known[key][0]

    setattr(module, name, remembered)


def _end_with_parent(parent: int) -> None:
    """End this process when the one that asked for it is gone: nobody would collect what it compiles."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os._exit(EXIT_FAILED)


def _disassemble(out: Path, names: Sequence[str]) -> tuple[str | None, ...]:
    """Write `<name>.sass` with source lines for each name; gives the reason where that is not possible."""
    tool = find_disassembler()
    if tool is None:
        return ("nvidia-cuda-nvdisasm is not installed",) * len(names)
    texts = disassemble(tool, [(out / f"{name}.cubin").read_bytes() for name in names])
    for name, text in zip(names, texts, strict=True):
        if not isinstance(text, DisassemblyError):
            (out / f"{name}.sass").write_text(text)
    return tuple(str(text) if isinstance(text, DisassemblyError) else None for text in texts)


if __name__ == "__main__":
    sys.exit(main())
