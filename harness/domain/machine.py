"""What is here: processors, GPUs, driver, libraries. Recorded with every number."""

from enum import StrEnum

from harness.domain.cell import Arch
from harness.domain.record import Record, Whole

__all__ = ["Gpu", "Machine", "Tier"]


class Tier(StrEnum):
    """How strong evidence from a machine can be, weakest first."""

    SMOKE = "smoke"
    RANK = "rank"
    NODE = "node"
    CLAIM = "claim"

    @property
    def strength(self) -> int:
        """0 for smoke up to 3 for claim."""
        return list(Tier).index(self)


class Gpu(Record):
    """One GPU as NVML names it."""

    name: str
    arch: Arch | None
    """None where no claim can name it."""
    memory_bytes: Whole
    sm_count: Whole | None = None


class Machine(Record):
    """Hardware and software that evidence was made on. Host names and paths stay out."""

    platform: str
    """Kernel and processor architecture, such as `Linux-x86_64`."""
    cpu_model: str
    cpu_count: Whole
    memory_bytes: Whole
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    nvlinks: Whole | None = None
    """NVLinks between the GPUs; None where it was not read."""
    python: str
    libraries: tuple[tuple[str, str], ...] = ()
    """(distribution, version), sorted."""

    @property
    def best_tier(self) -> Tier:
        """The strongest tier this machine can give evidence for; `claim` also needs the claimed size."""
        usable = [g for g in self.gpus if g.arch is not None]
        return Tier.SMOKE if not usable else Tier.RANK if len(usable) == 1 else Tier.NODE

    @property
    def arch(self) -> Arch:
        """Architecture that run evidence from here speaks of: the first usable GPU's, else `cpu`."""
        return next((g.arch for g in self.gpus if g.arch is not None), "cpu")
