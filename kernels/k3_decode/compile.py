"""Compile kernel variants for one architecture, in a process of its own, with no GPU and no driver.

`python -m k3_decode.compile --arch sm_90a --out DIR NAME...` leaves `<name>.ptx`, `<name>.cubin`,
`<name>.sass` (where a disassembler is installed) and `<name>.json` for each variant. The JSON file is written
last and by rename, so where it exists the others are whole. Invariant: cutlass is imported after its
environment is set, and only for the one architecture of the process, as the DSL keeps both for the life of a
process. A variant that does not compile leaves a JSON file with its error; the exit code is then 1.
What the process does to the compiler to be quick (`_hurry`) changes no byte of PTX or cubin.
"""

import argparse
import importlib
import json
import os
import pkgutil
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from k3_decode.cute.variant import Variant
from k3_decode.disassembly import DisassemblyError, disassemble, find_disassembler
from k3_decode.launches import Launch, parse_launches

__all__ = ["Launch", "all_variants", "compile_variants", "find_disassembler", "main", "parse_launches"]

EXIT_FAILED = 1
TOGETHER = 12
"""Variants disassembled at once: starting the disassembler takes as long as compiling a small one."""
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
    variants: Sequence[Variant], architecture: str, out: Path, dump: Path
) -> dict[str, str | None]:
    """Compile variants into `out`; gives for each its error in words, or None. `dump` is the DSL's dump
    folder.
    """
    records = [_compile(variant, architecture, out, dump) for variant in variants]
    compiled = [record for record in records if record["error"] is None]
    for record, missing in zip(compiled, _disassemble(out, [r["variant"] for r in compiled]), strict=True):
        record["sass_missing"] = missing
    for record in records:
        partial = out / f"{record['variant']}.json.part"
        partial.write_text(json.dumps(record))
        partial.replace(out / f"{record['variant']}.json")
    return {record["variant"]: record["error"] for record in records}


def main(argv: list[str] | None = None) -> int:
    """Compile the named variants (default: all that name the architecture); 1 when one failed."""
    parser = argparse.ArgumentParser(prog="python -m k3_decode.compile", description=__doc__.splitlines()[0])
    parser.add_argument("--arch", required=True, help="sm_90a, sm_100a or sm_103a")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args(argv)
    asked.out.mkdir(parents=True, exist_ok=True)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="cute-dump-") as folder:
        os.environ |= {
            "CUTE_DSL_ARCH": asked.arch,
            "CUTE_DSL_KEEP": "ir,ptx,cubin",
            "CUTE_DSL_DUMP_DIR": folder,
            "CUTE_DSL_LINEINFO": "1",
            "CUTE_DSL_NO_CACHE": "1",
        }
        if argv is None:
            _hurry()
        known = {v.name: v for v in all_variants() if asked.arch in v.architectures}
        names = asked.names or sorted(known)
        unknown = [n for n in names if n not in known]
        if unknown:
            parser.error(
                f"{asked.arch} has no variants {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        failed = False
        for start in range(0, len(names), TOGETHER):
            part = [known[name] for name in names[start : start + TOGETHER]]
            for name, error in compile_variants(part, asked.arch, asked.out, Path(folder)).items():
                failed |= error is not None
                sys.stderr.write(f"{name} {asked.arch}: {error or 'compiled'}\n")
    return EXIT_FAILED if failed else 0


def _compile(variant: Variant, architecture: str, out: Path, dump: Path) -> dict[str, Any]:
    """Compile one variant into `out`; gives its record."""
    record: dict[str, Any] = {
        "variant": variant.name,
        "op": variant.op,
        "architecture": architecture,
        "error": None,
        "launches": [],
    }
    begun = time.perf_counter()
    try:
        compiled: Any = variant.compile()
        ptx, cubin = compiled.__ptx__, compiled.__cubin__
        if ptx is None or cubin is None:
            raise RuntimeError("the compiler kept neither PTX nor cubin")
        (out / f"{variant.name}.ptx").write_text(ptx)
        (out / f"{variant.name}.cubin").write_bytes(cubin)
        record["launches"] = [launch._asdict() for launch in _take_launches(dump)]
    except Exception as error:  # noqa: BLE001  # whatever the compiler raises is a fact about the variant
        record["error"] = f"{type(error).__name__}: {error}"[:2000]
    record["compile_s"] = round(time.perf_counter() - begun, 3)
    return record


def _hurry() -> None:
    """Make the compiler of this process quick. Without torch, which the DSL's binding imports where it finds
    it and nothing here needs, a process starts 2 s earlier; the rest is below.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # the documented way to bar an import
    _leave_out_the_host_part()
    _remember_source_places()


def _leave_out_the_host_part() -> None:
    """Have `cute.compile` of this process stop at the cubin: machine code of the host is 40 % of a compile
    and runs nowhere here. The cubins are the same, byte for byte.
    """
    cute: Any = importlib.import_module("cutlass.cute")
    whole = cute.compile

    def device_part(function: object, *arguments: object, **options: object) -> object:
        return whole(function, *arguments, no_jit_engine=True, **options)

    cute.compile = device_part


def _remember_source_places() -> None:
    """Have the DSL look up the source line of an instruction once. It walks a function's position table from
    its start for each operation that it builds: half of the time of a kernel that is unrolled at length.
    """
    operations: Any = importlib.import_module("cutlass._mlir_helpers.op")
    look_up = getattr(operations, "_fast_frameinfo", None)
    if look_up is None:
        return  # another version of the DSL: slower, not different
    known: dict[tuple[int, int], tuple[object, CodeType]] = {}

    def remembered(frame: FrameType) -> object:
        key = (id(frame.f_code), frame.f_lasti)
        if key not in known:
            known[key] = look_up(frame), frame.f_code  # holding the code keeps its id from being used again
        return known[key][0]

    operations._fast_frameinfo = remembered


def _end_with_parent(parent: int) -> None:
    """End this process when the one that asked for it is gone: nobody would collect what it compiles."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os._exit(EXIT_FAILED)


def _take_launches(dump: Path) -> tuple[Launch, ...]:
    """Launches of the compile that just ended; its dump files are removed, as their names are cut and may
    repeat.
    """
    found: list[Launch] = []
    for path in sorted(dump.iterdir()):
        if path.suffix == ".mlir":
            found += parse_launches(path.read_text(errors="replace"))
        path.unlink()
    return tuple(found)


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
