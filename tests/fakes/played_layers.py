"""Whole layers on a played device, and the fake pack that offers them."""

from collections.abc import Callable, Sequence

from harness.domain.pack import LayerCounts, LayerError, LayerRequest, LayerSlice
from tests.fakes.pack import FakePack
from tests.fakes.played_device import PlayedDevice

__all__ = ["LayerPack", "PlayedSlice"]

LAYERS = 8
TIMES = {"marlin": 100.0, "humming": 90.0, "optimised": 40.0}


class PlayedSlice:
    """Layers whose arms take known times on a played device, or all read one set of weights. Errors and
    counts are written by hand.
    """

    def __init__(self, asked: list[str], device: PlayedDevice, is_warm: bool) -> None:
        self._asked, self._device, self._is_warm = asked, device, is_warm

    stock_arms = ("marlin", "humming")

    def replay(self, arm: str) -> Callable[[], None]:
        def replay() -> None:
            self._device.launch(0.0)
            for _ in range(LAYERS):
                if self._is_warm:
                    self._device.read("one", 40e6)
                else:
                    self._device.launch(TIMES[arm], host_us=0.0)

        return replay

    def reset(self, arm: str) -> None: ...

    def counts(self, arm: str) -> LayerCounts:
        is_optimised = arm == "optimised"
        return LayerCounts(
            kernels=9.0 if is_optimised else 23.0,
            prefetches=1.0 if is_optimised else 0.0,
            memory_operations=0.0,
            experts=16.0,
            moved_bytes=40e6 if self._is_warm else 80e6 if is_optimised else 120e6,
            is_optimised=is_optimised,
        )

    def errors(self) -> Sequence[LayerError]:
        return [LayerError("stock", 0, 0, 0.006), LayerError("optimised", 0, 0, 0.004)]

    def read_gb_per_s(self) -> float:
        return 4000.0

    def absent_exchanges(self) -> tuple[str, ...]:
        return ("all-reduce",)

    def close(self) -> None:
        self._asked.append("closed")


class LayerPack(FakePack):
    """The fake pack with layers to time."""

    def __init__(self, device: PlayedDevice | None = None, *, is_warm: bool = False) -> None:
        super().__init__()
        self.asked: list[str] = []
        self._device, self._is_warm = device or PlayedDevice(), is_warm

    def layer_kinds(self) -> tuple[str, ...]:
        return ("kda_moe", "mla_moe")

    def open_layers(self, request: LayerRequest) -> LayerSlice:
        self.asked.append(f"{request.kind} {request.layout} tp{request.tp} b{request.batch}")
        return PlayedSlice(self.asked, self._device, self._is_warm)
