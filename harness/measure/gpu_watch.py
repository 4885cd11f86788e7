"""What the GPU did while it was timed: clocks, power, temperature, why it ran slower, who else was on it.

Read through NVML between blocks, never while one runs. Where NVML cannot be read there are no readings, and
nobody takes that for a quiet card.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from harness.domain.table_shape import COUNT, NUMBER, TEXT, TableShape

__all__ = ["GPU_SHAPE", "GpuReading", "GpuWatch", "disturbance", "watched_gpu"]

GPU_SHAPE = TableShape(
    {
        "block": COUNT, "sm_mhz": NUMBER, "memory_mhz": NUMBER, "power_w": NUMBER, "temperature_c": NUMBER,
        "throttled": TEXT, "processes": COUNT, "ecc_errors": COUNT,
    },
    key=("block",),
)  # fmt: skip
SLOWED: Mapping[int, str] = {
    0x04: "power cap", 0x08: "hardware slowdown", 0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown", 0x80: "power brake",
}  # fmt: skip
"""Bits of NVML's reasons for lower clocks (nvml.h, nvmlClocksEventReason*) that are no setting and no
idling."""
HARMLESS = "power cap"
"""A card at its limit of power is as it was bought; it shows in the clocks, which are kept."""


class GpuReading(NamedTuple):
    """The card behind one block."""

    block: int
    sm_mhz: float
    memory_mhz: float
    power_w: float
    temperature_c: float
    throttled: str
    """Reasons, joined by commas; empty: none."""
    processes: int
    ecc_errors: int
    """Uncorrected, since the driver was loaded; 0 where the card does not count them."""


class GpuWatch:
    """Collects readings of one card."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self.readings: list[GpuReading] = []

    def look(self, block: int) -> None:
        """One reading."""
        nvml, card = self._nvml, self._handle
        reasons = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card))
        self.readings.append(
            GpuReading(
                block,
                float(nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM)),
                float(nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_MEM)),
                nvml.nvmlDeviceGetPowerUsage(card) / 1e3,
                float(nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU)),
                ", ".join(words for bit, words in SLOWED.items() if reasons & bit),
                len(nvml.nvmlDeviceGetComputeRunningProcesses(card)),
                _ecc_errors(nvml, card),
            )
        )


@contextlib.contextmanager
def watched_gpu(uuid: str | None) -> Iterator[GpuWatch | None]:
    """A watch of the card with this id; None where NVML or the card cannot be read."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield _watch(pynvml, uuid)
    finally:
        pynvml.nvmlShutdown()


def disturbance(readings: Iterable[Sequence[Any]]) -> str | None:
    """Why times beside these readings are none of the code alone, in words; None where they are. Pure."""
    rows = [GpuReading(*row) for row in readings]
    slowed = {reason for row in rows for reason in row.throttled.split(", ")} - {"", HARMLESS}
    if slowed:
        return f"the card was slowed down meanwhile: {', '.join(sorted(slowed))}"
    most = max((row.processes for row in rows), default=0)
    if most > 1:
        return f"{most} processes were on the card at once"
    errors = [row.ecc_errors for row in rows]
    if errors and max(errors) > min(errors):
        return f"{max(errors) - min(errors)} uncorrected memory errors came up meanwhile"
    return None


def _watch(nvml: Any, uuid: str | None) -> GpuWatch | None:
    try:
        name = None if uuid is None else uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        card = (
            nvml.nvmlDeviceGetHandleByIndex(0)
            if name is None
            else nvml.nvmlDeviceGetHandleByUUID(name.encode())
        )
        watch = GpuWatch(nvml, card)
        watch.look(0)
    except nvml.NVMLError:
        return None
    return watch


def _ecc_errors(nvml: Any, card: Any) -> int:
    try:
        return int(
            nvml.nvmlDeviceGetTotalEccErrors(
                card, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
        )
    except nvml.NVMLError:
        return 0
