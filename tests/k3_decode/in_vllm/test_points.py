"""An unknown vLLM is left alone, and says so."""

from types import SimpleNamespace
from typing import Any

import pytest
from k3_decode.in_vllm import plugin, points


def installed(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points, "vllm_version", lambda: version)


class Everything:
    """A module that has every point as it is expected."""

    def __init__(self, module: str) -> None:
        for point in points.POINTS:
            if point.module == module:
                owner: Any = self
                *names, last = point.name.split(".")
                for name in names:
                    owner.__dict__.setdefault(name, SimpleNamespace())
                    owner = owner.__dict__[name]
                namespace: dict[str, Any] = {}
                exec(f"def f({', '.join(point.parameters)}): ...", namespace)
                setattr(owner, last, namespace["f"])


def test_a_version_that_nobody_read_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    installed("0.34.1", monkeypatch)
    assert points.missing_points(Everything) == ("vLLM 0.34.1: only 0.33.x is known here",)


def test_a_known_version_with_every_point_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    installed("0.33.0", monkeypatch)
    assert points.missing_points(Everything) == ()


def test_a_point_with_other_parameters_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed("0.33.0", monkeypatch)

    def other(module: str) -> Any:
        found = Everything(module)
        if module == points.MODEL_MODULE:
            found.specialized_decode_config = lambda renamed: None  # type: ignore[attr-defined]
        return found

    (words,) = points.missing_points(other)
    assert words.endswith("specialized_decode_config takes ('renamed',), and ('vllm_config',) are expected")


def test_registering_beside_an_unknown_vllm_changes_nothing_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed("0.20.0", monkeypatch)
    plugin.register()
    assert "k3_decode stays off: vLLM 0.20.0: only 0.33.x is known here" in caplog.text
