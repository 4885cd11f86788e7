"""Compile kernel variants for one architecture, in a process of its own, with no GPU and no driver.

`python -m k3_decode.compile --arch sm_90a --out DIR NAME...` leaves `<name>.ptx`, `<name>.cubin`,
`<name>.sass` (where a disassembler is installed) and `<name>.json` for each variant. The JSON file is written
last and by rename, so where it exists the others are whole. Invariant: cutlass is imported after its
environment is set, and only for the one architecture of the process, as the DSL keeps both for the life of a
process. A variant that does not compile leaves a JSON file with its error; the exit code is then 1.
"""

import argparse
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from k3_decode.cute.variant import Variant

__all__ = ["Launch", "all_variants", "compile_variant", "find_disassembler", "main", "parse_launches"]

EXIT_FAILED = 1
DISASSEMBLY_TIMEOUT_S = 300
PARENT_POLL_S = 2.0


class Launch(NamedTuple):
    """How the host launches one kernel, as the compiler's own IR states it; None: no constant."""

    kernel: str
    is_dependent: bool
    """Whether programmatic stream serialisation is allowed, so that the kernel may start before its
    predecessor ends.
    """
    cluster: tuple[int, int, int]
    block: tuple[int | None, int | None, int | None]
    dynamic_shared_bytes: int | None


def all_variants() -> tuple[Variant, ...]:
    """Variants of every module under `cute/` that has `variants()`, in module order."""
    package = importlib.import_module("k3_decode.cute")
    found: list[Variant] = []
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda i: i.name):
        module = importlib.import_module(f"k3_decode.cute.{info.name}")
        if hasattr(module, "variants"):
            found += module.variants()
    return tuple(found)


def find_disassembler() -> Path | None:
    """`nvdisasm` of NVIDIA's wheel, which knows what the DSL's compiler emits; None where it is not
    installed.
    """
    try:
        files = metadata.distribution("nvidia-cuda-nvdisasm").files or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(f.locate())) for f in files if f.name in ("nvdisasm", "nvdisasm.exe")), None)


def parse_launches(ir: str) -> tuple[Launch, ...]:
    """Launches in the DSL's cleaned host IR: grid configuration, its attributes and the kernel they belong
    to.
    """
    constants = dict(re.findall(r"(%[\w#]+) = arith\.constant (-?\d+) : i(?:32|64)", ir))

    def number(name: str) -> int | None:
        return int(constants[name]) if name in constants else None

    launches = []
    pattern = (
        r"(%[\w#]+) = cuda\.launch_cfg\.create.*?blockDim = \((%[\w#]+), (%[\w#]+), (%[\w#]+)\), "
        r"dynamicSmemBytes = (%[\w#]+)"
    )
    for config, *block, shared in re.findall(pattern, ir):
        at = re.escape(f"[{config}]")
        pdl = re.search(rf"programmatic_stream_serialization_allowed{at} (%[\w#]+)", ir)
        cluster = re.search(rf"launch_cfg\.cluster_dim{at} \((%[\w#]+), (%[\w#]+), (%[\w#]+)\)", ir)
        kernel = re.search(rf"cuda\.launch_ex @kernels::@(\w+)<{re.escape(config)}>", ir)
        if kernel is None:
            continue
        dims = [number(v) or 1 for v in cluster.groups()] if cluster else [1, 1, 1]
        launches.append(
            Launch(
                kernel[1],
                pdl is not None and number(pdl[1]) != 0,
                (dims[0], dims[1], dims[2]),
                (number(block[0]), number(block[1]), number(block[2])),
                number(shared),
            )
        )
    return tuple(launches)


def compile_variant(variant: Variant, architecture: str, out: Path, dump: Path) -> str | None:
    """Compile one variant into `out`; gives the error in words, or None. `dump` is the DSL's dump folder."""
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
        record["sass_missing"] = _disassemble(out, variant.name)
    except Exception as error:  # noqa: BLE001  # whatever the compiler raises is a fact about the variant
        record["error"] = f"{type(error).__name__}: {error}"[:2000]
    record["compile_s"] = round(time.perf_counter() - begun, 3)
    partial = out / f"{variant.name}.json.part"
    partial.write_text(json.dumps(record))
    partial.replace(out / f"{variant.name}.json")
    return record["error"]  # type: ignore[no-any-return]  # a str or None, set above


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
        _leave_out_the_host_part()
        known = {v.name: v for v in all_variants() if asked.arch in v.architectures}
        names = asked.names or sorted(known)
        unknown = [n for n in names if n not in known]
        if unknown:
            parser.error(
                f"{asked.arch} has no variants {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        failed = False
        for name in names:
            error = compile_variant(known[name], asked.arch, asked.out, Path(folder))
            failed |= error is not None
            sys.stderr.write(f"{name} {asked.arch}: {error or 'compiled'}\n")
    return EXIT_FAILED if failed else 0


def _leave_out_the_host_part() -> None:
    """Have `cute.compile` of this process stop at the cubin: machine code of the host is 40 % of a compile
    and runs nowhere here. The cubins are the same, byte for byte.
    """
    cute: Any = importlib.import_module("cutlass.cute")
    whole = cute.compile

    def device_part(function: object, *arguments: object, **options: object) -> object:
        return whole(function, *arguments, no_jit_engine=True, **options)

    cute.compile = device_part


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


def _disassemble(out: Path, name: str) -> str | None:
    """Write `<name>.sass` with source lines; gives the reason where that is not possible."""
    tool = find_disassembler()
    if tool is None:
        return "nvidia-cuda-nvdisasm is not installed"
    command = [str(tool), "-g", "-c", str(out / f"{name}.cubin")]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=DISASSEMBLY_TIMEOUT_S, check=False
    )
    if ended.returncode != 0:
        return f"nvdisasm ended with {ended.returncode}: {ended.stderr.strip()[:300]}"
    (out / f"{name}.sass").write_text(ended.stdout)
    return None


if __name__ == "__main__":
    sys.exit(main())
