"""Pack NVIDIA's CuTe DSL so that it can be carried to a GPU machine that reaches no package index.

    python -m k3_decode.peers.pack_cutedsl [FOLDER]        default: .carry/cutedsl

Downloads the CPython 3.12 x86-64 wheels of nvidia-cutlass-dsl (CUDA 13 only) and apache-tvm-ffi, unpacks
them, writes one xz archive of about 64 MiB and cuts it into parts of at most 24 MiB: FOLDER-0/part,
FOLDER-1/part, FOLDER-2/part (takes about five minutes of one core, once). Carry the folders in as many
transfers as their size asks for, moving each part away on arrival:

    mkdir -p /tmp/parts /tmp/site && mv .carry/cutedsl-0/part /tmp/parts/0          # likewise 1 and 2
    cat /tmp/parts/0 /tmp/parts/1 /tmp/parts/2 | xz -dc | tar -C /tmp/site -xf -    # about 5 s
    export PYTHONPATH=/tmp/site:/tmp/site/nvidia_cutlass_dsl/dsl_packages           # no .pth file is read

Seen working on an H200 with Python 3.12, torch 2.11 and driver 580: import 2 s, compile and launch,
CUDA-graph capture, and kernels visible to torch.profiler inside graph replays.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

VERSION = "4.8.1"
WHEELS = [
    f"{name}=={VERSION}"
    for name in (
        "nvidia-cutlass-dsl",
        "nvidia-cutlass-dsl-libs-base",
        "nvidia-cutlass-dsl-libs-core",
        "nvidia-cutlass-dsl-libs-cu13",
    )
]
WHEELS.append("apache-tvm-ffi==0.1.11")
PLATFORMS = [
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_24_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
]
PART_BYTES = 24 * 2**20


def download(wheels: pathlib.Path) -> None:
    """Fetch the wheels for the GPU machine's Python, whatever Python runs this."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary=:all:",
            "--python-version",
            "3.12",
            "--implementation",
            "cp",
            "--abi",
            "cp312",
            "--abi",
            "abi3",
            "--abi",
            "none",
            *platforms,
            "-d",
            str(wheels),
            *WHEELS,
        ],
        check=True,
    )


def main() -> int:
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".carry/cutedsl").resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = pathlib.Path(scratch_name)
        wheels, site, archive = scratch / "wheels", scratch / "site", scratch / "archive"
        wheels.mkdir()
        download(wheels)
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(site)
        shutil.rmtree(
            site / "nvidia_cutlass_dsl" / "dsl_packages" / "iket", ignore_errors=True
        )  # profiler files: not needed
        print("compressing (about five minutes) ...", flush=True)
        with open(archive, "wb") as sink:
            tar = subprocess.Popen(["tar", "-C", str(site), "-c", "."], stdout=subprocess.PIPE)
            subprocess.run(["xz", "-9e", "-T1"], stdin=tar.stdout, stdout=sink, check=True)
            if tar.wait() != 0:
                return 1
        content = archive.read_bytes()
    parts = [content[start : start + PART_BYTES] for start in range(0, len(content), PART_BYTES)]
    for number, part in enumerate(parts):
        place = folder.with_name(f"{folder.name}-{number}")
        place.mkdir(exist_ok=True)
        (place / "part").write_bytes(part)
        print(f"{place}: {len(part) / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
