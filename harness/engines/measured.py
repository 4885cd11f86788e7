"""Engines that a program of the pack runs and measures, arm by arm: what a server cannot tell over HTTP.

Forced tokens, the engine's own graphs and the kernels of its layers are seen from inside the engine's process
alone. So a program is started for each arm, a few at a time, and leaves one JSON file; `read_measured` takes
the file as the record that evals judge. Which program, model and arms is for the server settings to say.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from harness.domain.errors import ServiceError
from harness.domain.record import Number, Positive, Record, Whole
from harness.engines.server_process import ServerProcess, free_port

__all__ = ["ARMS", "CUT_KINDS", "MeasuredArm", "MeasuredArms", "MeasuredEngine", "measure_arms"]

ArmName = Literal["stock", "optimised", "switch_off", "spread", "spread_other", "poison"]
ARMS: tuple[ArmName, ...] = ("stock", "optimised", "switch_off", "spread", "spread_other", "poison")
"""`switch_off`: the optimised build with its switch off; `spread`: stock by other backends of its own."""
CUT_KINDS = ("dense", "kda_moe", "mla_moe", "mla_moe_first", "model")
POLL_S = 0.2
Setting = tuple[str, str]


class MeasuredArm(Record):
    """One engine."""

    name: ArmName
    arguments: tuple[str, ...] = ()
    """Behind the common ones."""
    environment: tuple[Setting, ...] = ()


class MeasuredArms(Record):
    """The program that measures, and the arms that it is started for."""

    program: tuple[str, ...] = Field(min_length=1)
    """Takes an arm's name, `--out FOLDER`, and `--wait-for N --meet FOLDER`: engines that start side by side
    are measured one after another.
    """
    common: tuple[str, ...] = ()
    environment: tuple[Setting, ...] = ()
    arms: tuple[MeasuredArm, ...]
    at_once: Positive = 2
    limit_s: Number = Field(default=300, gt=0)
    """For the engines that run at once, from their start to their files."""

    @model_validator(mode="after")
    def _arms_are_apart(self) -> Self:
        names = [arm.name for arm in self.arms]
        if len(set(names)) != len(names):
            raise ValueError(f"an arm is named twice among {', '.join(names)}")
        if missing := [name for name in ("stock", "optimised") if name not in names]:
            raise ValueError(f"there is no arm {' and no arm '.join(missing)}")
        return self


class _Told(Record):
    """Of a program's file only what is judged is read; the rest is for its own readers."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Forced(_Told):
    """One batch along forced tokens."""

    top: tuple[tuple[dict[Whole, float], ...], ...]
    """By request and position: log-probabilities of the likeliest tokens. The prompt's own step comes first.
    """
    ids: tuple[tuple[Whole, ...], ...]
    launches: tuple[Whole, ...] = ()
    """By op, as the kernels themselves counted; none where nothing counts."""
    is_forced: Literal[True]
    """Whether the engine gave the tokens that it was given."""


class Cut(_Told):
    """Profiled decode steps of one batch."""

    layers: tuple[tuple[Whole, Whole, str, Whole, float], ...]
    """(step, layer, kind, kernels, microseconds); of kind `model`, the whole step."""
    names: tuple[tuple[str, Positive, float], ...]
    """(kernel, launches, microseconds) over those steps."""


class Times(_Told):
    """Microseconds, turn by turn."""

    all_us: tuple[float, ...]


class MeasuredEngine(_Told):
    """What one arm's file says. Batches are keys."""

    selected: Mapping[str, Any] = Field(default_factory=dict)
    forced: Mapping[Positive, Forced]
    cut: Mapping[Positive, Cut] = Field(default_factory=dict)
    replays: Mapping[Positive, Times] = Field(default_factory=dict)
    steps: Mapping[Positive, Times] = Field(default_factory=dict)
    decisions: tuple[tuple[Positive, Literal["stock", "optimised"], str], ...] = ()
    """(batch, path, reason) of every step that the dispatcher decided."""


class Lost(NamedTuple):
    """An arm that left nothing, and why."""

    arm: str
    words: str


def measure_arms(
    settings: MeasuredArms, folder: Path, logs: Path, progress: Callable[[str], None]
) -> tuple[dict[str, MeasuredEngine], tuple[Lost, ...]]:
    """Every arm's measurement by name, and the arms that came to nothing.

    Raises `ServiceError` where the program cannot be started, or stock came to nothing: that is no fault of
    the candidate's.
    """
    found: dict[str, MeasuredEngine] = {}
    lost: list[Lost] = []
    folder.mkdir(parents=True, exist_ok=True)
    for number, wave in enumerate(_waves(settings.arms, settings.at_once)):
        progress(f"engines {', '.join(arm.name for arm in wave)}")
        for arm, words in _run_wave(settings, wave, folder, logs, f"meet-{number}").items():
            read = words or _read(folder / f"{arm}.json")
            if isinstance(read, MeasuredEngine):
                found[arm] = read
            elif arm == "stock":
                raise ServiceError(f"the stock engine was not measured: {read}")
            else:
                lost.append(Lost(arm, read))
    return found, tuple(lost)


def _waves(arms: Sequence[MeasuredArm], size: int) -> Iterator[tuple[MeasuredArm, ...]]:
    for begin in range(0, len(arms), size):
        yield tuple(arms[begin : begin + size])


def _run_wave(
    settings: MeasuredArms, wave: Sequence[MeasuredArm], folder: Path, logs: Path, meeting: str
) -> Mapping[str, str]:
    """Why each arm came to nothing; empty where its program ended well."""
    limit = time.monotonic() + float(settings.limit_s)
    with ExitStack() as stack:
        running = {}
        for arm in wave:
            command = (
                *settings.program, arm.name, *settings.common, *arm.arguments, "--out", str(folder),
                "--meet", str(folder / meeting), "--wait-for", str(len(wave)),
            )  # fmt: skip
            environment = {**dict(settings.environment), **dict(arm.environment)}
            process = ServerProcess(command, environment, logs / f"engine-{arm.name}.log", free_port())
            running[arm.name] = stack.enter_context(process)
        while any(p.exit_code() is None for p in running.values()) and time.monotonic() < limit:
            time.sleep(POLL_S)
        return {name: _why_lost(process, settings) for name, process in running.items()}


def _why_lost(process: ServerProcess, settings: MeasuredArms) -> str:
    code = process.exit_code()
    if code is None:
        return f"it was not done within {settings.limit_s} s. Its last words:\n{process.last_words()}"
    return "" if code == 0 else process.why_it_ended()


def _read(path: Path) -> MeasuredEngine | str:
    """A program's file; in words what is wrong with it."""
    try:
        return MeasuredEngine.model_validate_json(path.read_bytes())
    except OSError as error:
        return f"it ended and left no file that can be read ({error.strerror})"
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))[:80]
        return f"its file is no measurement: {place}: {first['msg'][:200]}"
