"""Packs are found where they are installed, and from a checkout alone on a bare machine."""

from importlib import metadata
from pathlib import Path

import pytest

from harness.domain.errors import InputError
from harness.engines import packs


def test_a_checkout_declares_its_packs_where_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda group: ())
    assert packs.installed_packs() == ("k3_decode",)
    assert packs.load_pack("k3_decode").name == "k3_decode"


def test_an_unknown_pack_is_told_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"'nobody'.*k3_decode"):
        packs.load_pack("nobody")


def test_a_source_digest_changes_with_any_byte_and_ignores_caches(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    before = packs.source_digest(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_bytes(b"cache")
    assert packs.source_digest(tmp_path) == before
    (tmp_path / "a.py").write_text("x = 2\n")
    assert packs.source_digest(tmp_path) != before
