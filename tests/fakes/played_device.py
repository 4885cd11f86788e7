"""A GPU that is played in virtual time: a queue, a clock of its own, and a cache.

It stands in for `torch` and `time` inside `harness.measure.layers`, so that the timers there are exercised as
they are, on a device whose every duration is known and which no load on this machine can disturb.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

__all__ = ["PlayedDevice", "played"]

LAUNCH_US, RECORD_US, WAIT_US = 4.0, 1.0, 8.0
"""What the host spends on a launch, on an event, and on finding out that the device is done."""
CYCLES_PER_US = 2000.0
L2_BYTES = 50e6
DRAM_BYTES_PER_US, L2_BYTES_PER_US = 4.0e6, 12.0e6


class PlayedDevice:
    """Microseconds of the host and of the device, and which sets of weights are cached."""

    def __init__(self) -> None:
        self.host_us, self.idle_from_us = 0.0, 0.0
        self._cached: dict[str, float] = {}

    def launch(self, us: float, host_us: float = LAUNCH_US) -> None:
        """A kernel that takes so long: queued, and begun when all before it are done."""
        self.host_us += host_us
        self.idle_from_us = max(self.idle_from_us, self.host_us) + us

    def read(self, name: str, size: float) -> None:
        """A kernel of a graph that reads a set of weights, from the cache where it is there."""
        is_warm = self._cached.pop(name, 0.0) > 0.0
        self._cached[name] = size
        while sum(self._cached.values()) > L2_BYTES:
            del self._cached[next(iter(self._cached))]
        self.launch(size / (L2_BYTES_PER_US if is_warm else DRAM_BYTES_PER_US), host_us=0.0)

    def flush(self, size: float) -> None:
        """A kernel that reads more than the cache holds."""
        self._cached.clear()
        self.launch(size / DRAM_BYTES_PER_US)

    def synchronize(self) -> None:
        """The host waits."""
        self.host_us = max(self.host_us, self.idle_from_us) + WAIT_US

    def clock_ns(self) -> int:
        """The host's clock."""
        return int(self.host_us * 1e3)


class _Event:
    def __init__(self, device: PlayedDevice) -> None:
        self._device, self.at_us = device, 0.0

    def record(self) -> None:
        self._device.host_us += RECORD_US
        self.at_us = max(self._device.host_us, self._device.idle_from_us)

    def synchronize(self) -> None:
        self._device.host_us = max(self._device.host_us, self.at_us) + WAIT_US

    def elapsed_time(self, ended: "_Event") -> float:
        return (ended.at_us - self.at_us) / 1e3


@contextmanager
def played() -> Iterator[PlayedDevice]:
    """`harness.measure.layers` on a played device."""
    from harness.measure import layers

    device = PlayedDevice()
    cuda = SimpleNamespace(
        Event=lambda **_: _Event(device),
        _sleep=lambda cycles: device.launch(cycles / CYCLES_PER_US),
        synchronize=device.synchronize,
        get_device_properties=lambda _: SimpleNamespace(L2_cache_size=int(L2_BYTES), uuid="played"),
    )

    def zeros(size: int, **_: Any) -> Any:
        whole = SimpleNamespace(amax=lambda: device.flush(size))
        return SimpleNamespace(view=lambda _kind: whole)

    fake = SimpleNamespace(cuda=cuda, zeros=zeros, uint8=None, int32=None)
    with (
        mock.patch.object(layers, "torch", fake),
        mock.patch.object(layers, "time", SimpleNamespace(perf_counter_ns=device.clock_ns)),
        mock.patch.object(layers, "_forget_persisting"),
    ):
        yield device
