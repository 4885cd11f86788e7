"""What leaves text before it enters a bundle, and what must stay."""

import base64

import pytest

from harness.domain.bundle import Environment
from harness.evidence.environment import read_environment
from harness.evidence.redaction import Redactor

SECRET = "Sup3r-s3cret/value+1"
NOBODY = Redactor({})


@pytest.mark.parametrize(
    "text",
    [
        f"plain {SECRET} text",
        f"https://example.com/?x={SECRET.replace('/', '%2F').replace('+', '%2B')}",
        '{"x": "' + SECRET + '"}',
        base64.b64encode(SECRET.encode()).decode(),
        f"X={SECRET};",
    ],
)
def test_a_variables_value_is_replaced_however_it_is_spelled(text: str) -> None:
    redacted = Redactor({"INNOCENT": SECRET}).text(text)
    assert SECRET not in redacted
    assert "<redacted>" in redacted


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("git clone https://user:pa55@github.com/o/r", "git clone https://<redacted>@github.com/o/r"),
        ("https://ghp_x@host/a", "https://<redacted>@host/a"),
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: <redacted>"),
        ('"authorization": "token abc"', '"authorization": <redacted>'),
        ("Cookie: session=1; id=2", "Cookie: <redacted>"),
        ("X-Api-Key: k123", "X-Api-Key: <redacted>"),
        ("sent Bearer abcdef123456", "sent Bearer <redacted>"),
        ("ghp_0123456789abcdefABCDEF0123456789abcd", "<redacted>"),
        ("github_pat_11ABCDEFG0123456789abcdef", "<redacted>"),
        ("hf_abcdefghijklmnopqrstuvwxyz", "<redacted>"),
        ("glpat-abcdefghij0123456789", "<redacted>"),
        ("AKIAIOSFODNN7EXAMPLE", "<redacted>"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln", "<redacted>"),
        ("GET /x?a=1&access_token=abc&b=2", "GET /x?a=1&access_token=<redacted>&b=2"),
        ("run --api-key abcd1234 now", "run --api-key <redacted> now"),
        ("export HF_TOKEN=abcd1234", "export HF_TOKEN=<redacted>"),
        ("/home/alice/work/x.py and /Users/bob/y", "~/work/x.py and ~/y"),
        (
            "-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----\nrest",
            "<redacted>\nrest",
        ),
    ],
)
def test_a_credential_known_by_its_shape_is_replaced(text: str, left: str) -> None:
    assert NOBODY.text(text) == left


@pytest.mark.parametrize(
    "text",
    [
        "first differing token: 17, 512 tokens decoded, stop_token=3, MAX_TOKENS=4096",
        "key norm 0.031 against 0.030; KEY_DIM: 128",
        "https://github.com/vllm-project/vllm/pull/61867#discussion",
        "kernels/k3_decode/cute/kda_step.py:118 basic block, bearer of state",
        "relative L2 3.42e-3 (bound 4.84e-3), batch 64",
    ],
)
def test_evidence_is_left_alone(text: str) -> None:
    assert Redactor({"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "128", "LANG": "C.UTF-8"}).text(text) == text


def test_redacting_twice_changes_nothing_more() -> None:
    redactor = Redactor({"A": SECRET, "HOME": "/home/alice"})
    once = redactor.text(f"{SECRET} https://u:p@h/ Authorization: x /home/alice/y HF_TOKEN=abcdefgh")
    assert redactor.text(once) == once


def test_only_listed_variables_are_recorded() -> None:
    environment = read_environment(
        ["fasttrack"], {"OMP_NUM_THREADS": "2", "HF_TOKEN": "x", "VLLM_API_KEY": "y"}
    )
    assert environment == Environment(command=("fasttrack",), variables=(("OMP_NUM_THREADS", "2"),))
