"""The token and the address come from the environment, and odd ones are refused without being shown."""

import pytest

from harness.domain.errors import DeviceMissing, InputError
from harness.forge.client import Access, open_client, read_access


def test_the_token_is_the_first_variable_that_is_set() -> None:
    assert read_access({"GITHUB_TOKEN": "a1", "GH_TOKEN": "b2"}).token == "a1"
    assert read_access({"GITHUB_TOKEN": "", "GH_TOKEN": "b2\n"}).token == "b2"
    assert read_access({}).token is None


@pytest.mark.parametrize("token", ["two words", "line\r\nX-Header: 1", "näh", "x" * 1025])
def test_an_odd_token_is_refused_without_being_shown(token: str) -> None:
    with pytest.raises(InputError) as refusal:
        read_access({"GH_TOKEN": token})
    assert str(refusal.value) == (
        "GH_TOKEN holds something that is no token (blanks or odd characters); set it anew"
    )


def test_the_address_is_github_s_or_that_of_the_variable() -> None:
    assert read_access({}).api == "https://api.github.com"
    assert read_access({"GITHUB_API_URL": "https://git.example/api/v3/"}).api == "https://git.example/api/v3"
    assert read_access({"GITHUB_API_URL": "http://127.0.0.1:8080"}).api == "http://127.0.0.1:8080"


@pytest.mark.parametrize(
    "address", ["http://git.example", "https://user:secret@git.example", "file:///etc/passwd", "git.example"]
)
def test_a_token_is_sent_to_no_address_without_encryption(address: str) -> None:
    with pytest.raises(InputError, match="GITHUB_API_URL is no https address"):
        read_access({"GITHUB_API_URL": address, "GITHUB_TOKEN": "a1"})


def test_access_does_not_show_its_token() -> None:
    shown = f"{Access('https://api.github.com', 'ghp_secret')!r} {Access('https://api.github.com', None)}"
    assert shown == (
        "Access(api='https://api.github.com', token=set) Access(api='https://api.github.com', token=none)"
    )


def test_without_githubkit_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "githubkit", None)
    with (
        pytest.raises(DeviceMissing, match=r"pip install 'fasttrack\[publish\]'"),
        open_client(Access("https://api.github.com", None), say=lambda words: None),
    ):
        pass
