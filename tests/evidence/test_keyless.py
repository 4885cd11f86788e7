"""Signatures by identity, checked offline against an authority and logs of our own."""

import json
from pathlib import Path

import pytest

from harness.domain.errors import EvidenceError, InputError
from harness.evidence.attestation import check_attestation, make_statement
from harness.evidence.keyless import check_keyless, sign_keyless
from harness.evidence.reader import Bundle, open_bundle
from harness.evidence.verify import verify
from tests.evidence.example_run import example_plan, only, write_example

pytest.importorskip("sigstore", reason="needs the extra sigstore")

from tests.evidence.own_sigstore import ISSUER, SUBJECT, OwnSigstore  # after the skip


@pytest.fixture(scope="module")
def own() -> OwnSigstore:
    return OwnSigstore()


@pytest.fixture
def root(own: OwnSigstore, tmp_path: Path) -> Path:
    path = tmp_path / "trusted_root.json"
    path.write_text(own.trusted_root())
    return path


@pytest.fixture
def signed(own: OwnSigstore, tmp_path: Path) -> Bundle:
    plan = only(example_plan(), lambda c: c.stage == "isolation")
    folder = write_example(tmp_path / "bundle", plan)
    (folder / "attestation.json").write_bytes(own.sign(make_statement(folder)))
    return open_bundle(folder)


def test_a_bundle_signed_by_an_identity_names_issuer_and_subject(signed: Bundle, root: Path) -> None:
    result = verify(signed.folder, trusted_root=root)
    assert result.signer == f"{ISSUER} {SUBJECT}"
    assert result.problems == ()


def test_without_a_root_of_trust_an_identity_counts_as_no_signer(signed: Bundle) -> None:
    result = verify(signed.folder)
    assert result.signer is None
    assert "no root of trust was named" in result.steps[-1].skipped


def test_an_identity_of_another_authority_is_refused(signed: Bundle, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(OwnSigstore().trusted_root())
    (problem,) = verify(signed.folder, trusted_root=other).problems
    assert "does not hold" in problem.message


@pytest.mark.parametrize("part", ["payload", "certificate", "promise", "body"])
def test_any_part_changed_after_signing_is_noticed(own: OwnSigstore, root: Path, part: str) -> None:
    value = json.loads(own.sign(b'{"_type":"https://in-toto.io/Statement/v1"}'))
    foreign = json.loads(own.sign(b'{"_type":"other"}', subject="https://github.com/mallory"))
    material, strange = value["verificationMaterial"], foreign["verificationMaterial"]
    if part == "payload":
        value["dsseEnvelope"]["payload"] = foreign["dsseEnvelope"]["payload"]
    elif part == "certificate":
        material["certificate"] = strange["certificate"]
    elif part == "promise":
        material["tlogEntries"][0]["inclusionPromise"] = strange["tlogEntries"][0]["inclusionPromise"]
    else:
        material["tlogEntries"][0]["canonicalizedBody"] = strange["tlogEntries"][0]["canonicalizedBody"]
    with pytest.raises(EvidenceError, match="does not hold"):
        check_keyless(json.dumps(value).encode(), root)


def test_a_signature_over_another_bundle_is_noticed(signed: Bundle, root: Path) -> None:
    with pytest.raises(EvidenceError, match="taken from another bundle"):
        check_attestation(signed.folder / "attestation.json", "0" * 64, signed.outcomes, root)


def test_a_root_of_trust_that_is_none_is_said(own: OwnSigstore, tmp_path: Path) -> None:
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(InputError, match="no root of trust can be read"):
        check_keyless(own.sign(b"{}"), tmp_path / "none.json")


def test_a_process_without_an_identity_is_told_so(signed: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    import sigstore.oidc

    monkeypatch.setattr(sigstore.oidc, "detect_credential", lambda: None)
    with pytest.raises(InputError, match="no identity to sign with"):
        sign_keyless(make_statement(signed.folder))
