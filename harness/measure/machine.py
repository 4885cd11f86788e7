"""Read what machine this is: processors, memory, GPUs, driver, links, libraries.

Nothing here creates a CUDA context: GPUs are read through NVML. A figure that cannot be read is None, never a
guess.
"""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.domain.cell import Arch
from harness.domain.machine import Gpu, Machine

__all__ = ["LIBRARIES", "read_machine"]

LIBRARIES = (
    "apache-tvm-ffi",
    "fla-core",
    "fasttrack",
    "lm-eval",
    "numpy",
    "nvidia-cutlass-dsl",
    "pydantic",
    "scipy",
    "torch",
    "triton",
    "vllm",
)
"""Distributions whose version can move a result."""
ARCH_BY_CAPABILITY: dict[tuple[int, int], Arch] = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}


def read_machine() -> Machine:
    """This machine. Host name and paths stay out."""
    gpus, driver, links = _read_gpus()
    return Machine(
        platform=f"{platform.system()}-{platform.machine()}",
        cpu_model=_cpu_model(),
        cpu_count=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=gpus,
        driver=driver,
        nvlinks=links,
        python=platform.python_version(),
        libraries=_libraries(),
    )


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _libraries() -> tuple[tuple[str, str], ...]:
    found = []
    for name in LIBRARIES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(found)


def _read_gpus() -> tuple[tuple[Gpu, ...], str | None, int | None]:
    """GPUs, driver and NVLinks through NVML; nothing where NVML or a driver is missing."""
    try:
        import pynvml
    except ImportError:
        return (), None, None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return (), None, None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        gpus = tuple(_read_gpu(pynvml, handle) for handle in handles)
        links = sum(_active_links(pynvml, handle) for handle in handles[:1]) if len(handles) > 1 else None
        return gpus, _text(pynvml.nvmlSystemGetDriverVersion()), links
    finally:
        pynvml.nvmlShutdown()


def _read_gpu(nvml: Any, handle: Any) -> Gpu:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        name=_text(nvml.nvmlDeviceGetName(handle)),
        arch=ARCH_BY_CAPABILITY.get((major, minor)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        sm_count=None,
    )


def _active_links(nvml: Any, handle: Any) -> int:
    count = 0
    for link in range(18):
        try:
            count += int(nvml.nvmlDeviceGetNvLinkState(handle, link) == 1)
        except nvml.NVMLError:
            break
    return count


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


if __name__ == "__main__":  # a bare GPU machine has no command line's packages
    import sys

    sys.stdout.write(read_machine().canonical().decode() + "\n")
