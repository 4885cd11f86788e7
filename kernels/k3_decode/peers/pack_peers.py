#!/usr/bin/env python3
"""Pack the peer kernels so that they can be carried to a GPU machine that reaches no package index.

    python -m k3_decode.peers.pack_peers [OUT.tar.xz] [--jit-cache NV.tgz]    default OUT: .carry/peers.tar.xz

Downloads the wheels below with pip into a scratch folder (about 400 MB, removed at the end), takes the files
that the benchmarks here need, blanks the GPU code of every architecture but sm_90 (PTX stays: Marlin runs
from it), and writes one reproducible xz archive of about 52 MiB. One core for about two minutes, once.
--jit-cache adds an archive of `~/.nv` from a GPU machine with the same driver: it saves the 20 s of the first
Marlin call there. README.md says how to use it.
"""

import argparse
import lzma
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable

from k3_decode.peers.fatbin import keep_architecture

SM = 90
LIMIT_BYTES = 60 * 2**20
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_24_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)
VLLM_EXTENSIONS = (
    "_C_stable_libtorch",
    "_moe_C_stable_libtorch",
    "_flashmla_C",
    "vllm_flash_attn/_vllm_fa3_C",
)
VLLM_FILES = (
    "vllm/models/common/ops/fused_qk_rmsnorm.py",
    "vllm/models/kimi_k3/nvidia/low_latency_gemm.py",
    "vllm/models/kimi_k3/nvidia/ops/attn_res.py",
    "vllm/models/kimi_k3/nvidia/ops/cute_dsl/kda_skinny_gemm.py",
    "vllm/models/kimi_k3/nvidia/ops/third_party/kda/fused_recurrent.py",
    "vllm/model_executor/kernels/linear/cute_dsl/_ll_bf16_dotprod.py",
    "vllm/model_executor/kernels/linear/cute_dsl/_ll_bf16_splitk.py",
    "vllm/model_executor/kernels/linear/cute_dsl/_ll_router_common.py",
    "vllm/model_executor/kernels/linear/cute_dsl/_skinny_gemm.py",
    "vllm/model_executor/kernels/linear/cute_dsl/ll_bf16.py",
    "vllm/model_executor/kernels/linear/cute_dsl/skinny_gemm.py",
    "vllm/model_executor/layers/fused_moe/moe_fused_mul_sum.py",
    "vllm/model_executor/layers/mamba/ops/causal_conv1d.py",
    "vllm/scalar_type.py",
    "vllm/utils/math_utils.py",
)
VLLM_FOLDER = "vllm/third_party/flash_linear_attention/"


def place_vllm(name: str) -> str | None:
    for extension in VLLM_EXTENSIONS:
        if name == f"vllm/{extension}.abi3.so":
            return f"{extension.rsplit('/', 1)[-1]}.so"
    return name if name in VLLM_FILES or name.startswith(VLLM_FOLDER) else None


def place_exactly(wanted: str, under: str = "") -> Callable[[str], str | None]:
    return lambda name: under + name if name == wanted else None


def place_below(prefix: str, under: str) -> Callable[[str], str | None]:
    return lambda name: under + name if name.startswith(prefix) else None


# requirement -> where each of the wheel's files goes in the archive (None: left out)
WHEELS: dict[str, Callable[[str], str | None]] = {
    "vllm==0.33.0": place_vllm,
    "quack-kernels==0.6.5": place_exactly("quack/compile_utils.py"),
    "apache-tvm-ffi==0.1.11": place_below("", "tvmffi/"),
    "flashinfer-python==0.7.2.post1": place_exactly("flashinfer/kda_kernels/fused_kda_decode.py", "fi/"),
    "fla-core==0.6.0": place_below("fla/", "flaroot/"),
    "humming-kernels==0.1.19": place_below("humming/", "hum/"),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", nargs="?", default=".carry/peers.tar.xz", type=pathlib.Path)
    parser.add_argument("--jit-cache", type=pathlib.Path, help="optional .tgz of ~/.nv made on a GPU machine")
    arguments = parser.parse_args()
    if arguments.jit_cache and not arguments.jit_cache.is_file():
        parser.error(
            f"--jit-cache {arguments.jit_cache}: no such file; leave the option out to pack without it"
        )
    out = arguments.out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = pathlib.Path(scratch_name)
        for requirement, place in WHEELS.items():
            extract(download(requirement, scratch / "wheels"), scratch / "pack", place)
        missing = [
            name
            for name in (*VLLM_FILES, *(f"{e}.so" for e in VLLM_EXTENSIONS))
            if not (scratch / "pack" / name).is_file()
        ]
        if missing:
            print(
                f"the vLLM wheel has no {', '.join(missing)}: its layout changed, mend VLLM_FILES",
                file=sys.stderr,
            )
            return 1
        trim(scratch / "pack")
        if arguments.jit_cache:
            shutil.copy(arguments.jit_cache, scratch / "pack" / "nv.tgz")
        print("compressing (about a minute) ...", flush=True)
        write_archive(scratch / "pack", out)
    size = out.stat().st_size
    print(f"{out}: {size / 2**20:.1f} MiB")
    if size > LIMIT_BYTES:
        print(f"larger than the target of {LIMIT_BYTES / 2**20:.0f} MiB", file=sys.stderr)
        return 1
    return 0


def download(requirement: str, folder: pathlib.Path) -> pathlib.Path:
    """The requirement's wheel for CPython 3.12 on x86-64 Linux, without its dependencies."""
    print(f"downloading {requirement} ...", flush=True)
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-cache-dir",
            "--only-binary=:all:",
            "--python-version",
            "3.12",
            "--implementation",
            "cp",
            "--abi",
            "abi3",
            "--abi",
            "none",
            *platforms,
            "-d",
            str(folder),
            requirement,
        ],
        check=True,
    )
    project = re.split("[=<>]", requirement)[0].replace("-", "_")
    (wheel,) = folder.glob(f"{project}-*.whl")
    return wheel


def extract(wheel: pathlib.Path, root: pathlib.Path, place: Callable[[str], str | None]) -> None:
    """Write the wanted files of a wheel below `root` and delete the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            target_name = None if member.is_dir() else place(member.filename)
            if target_name is None:
                continue
            target = (root / target_name).resolve()
            if not target.is_relative_to(root.resolve()):
                raise ValueError(f"{wheel.name}: {member.filename} points outside the archive")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(member))
    wheel.unlink()


def trim(root: pathlib.Path) -> None:
    """Blank the GPU code of other architectures in vLLM's extensions."""
    for name in VLLM_EXTENSIONS:
        path = root / f"{name}.so"
        library = bytearray(path.read_bytes())
        trimmed = keep_architecture(library, SM)
        path.write_bytes(library)
        kept_mb, blanked_mb = trimmed.kept_bytes / 1e6, trimmed.blanked_bytes / 1e6
        print(f"{path.name}: kept {kept_mb:.1f} MB of GPU code, blanked {blanked_mb:.1f} MB")


def write_archive(root: pathlib.Path, out: pathlib.Path) -> None:
    """One xz archive of a folder, equal for equal files: sorted names, no times, no owners."""

    def normalised(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        is_program = (
            entry.isdir() or ".so" in entry.name or "/_native/" in entry.name
        )  # humming runs its own compiler
        entry.mode = 0o755 if is_program else 0o644
        return entry

    partial = out.with_name(out.name + ".part")
    with lzma.open(partial, "wb", preset=6) as sink, tarfile.open(fileobj=sink, mode="w") as tar:
        for path in sorted(root.rglob("*")):
            tar.add(path, path.relative_to(root).as_posix(), recursive=False, filter=normalised)
    partial.replace(out)


if __name__ == "__main__":
    sys.exit(main())
