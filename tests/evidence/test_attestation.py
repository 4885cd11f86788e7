"""Signed bundles: who vouches, and for what."""

import base64
import json
import shutil
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from harness.domain.bundle import BundleState
from harness.domain.errors import EvidenceError, InputError
from harness.domain.record import canonical_bytes
from harness.evidence.attestation import load_key, sign_bundle
from harness.evidence.run_folder import open_run
from harness.evidence.verify import verify
from tests.evidence.example_judge import judge
from tests.evidence.example_run import example_plan, only, write_example
from tests.evidence.tampering import said

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
SIGNER = "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"
"""Public key of KEY: RFC 8032 test seeds 00..1f, as every Ed25519 library gives it."""


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_example(tmp_path / "bundle", only(example_plan(), lambda c: c.stage == "audit"))


def _envelope(bundle: Path) -> dict[str, object]:
    return dict(json.loads((bundle / "attestation.json").read_bytes()))


def test_a_signed_bundle_names_its_signer(bundle: Path) -> None:
    assert sign_bundle(bundle, KEY) == SIGNER
    result = verify(bundle, judge)
    assert (result.state, result.signer) == (BundleState.VERIFIED, SIGNER)


def test_signing_leaves_the_bundles_digest_as_it_was(bundle: Path) -> None:
    before = verify(bundle).bundle_digest
    sign_bundle(bundle, KEY)
    assert verify(bundle).bundle_digest == before


def test_the_statement_is_an_in_toto_test_result_about_the_manifest(bundle: Path) -> None:
    sign_bundle(bundle, KEY)
    statement = json.loads(base64.b64decode(str(_envelope(bundle)["payload"])))
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    assert statement["subject"] == [
        {"name": "manifest.json", "digest": {"sha256": verify(bundle).bundle_digest}}
    ]
    assert statement["predicate"]["result"] == "FAILED"
    assert statement["predicate"]["failedTests"] == ["audit/kda_step/sm_100a"]
    assert [c["name"] for c in statement["predicate"]["configuration"]] == [
        "claim", "policy", "plan", "harness", "pack",
    ]  # fmt: skip


def test_the_signature_is_over_the_dsse_encoding_so_that_other_tools_can_check_it(bundle: Path) -> None:
    sign_bundle(bundle, KEY)
    envelope = json.loads((bundle / "attestation.json").read_bytes())
    payload = base64.b64decode(envelope["payload"])
    signed = f"DSSEv1 28 application/vnd.in-toto+json {len(payload)} ".encode() + payload
    public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(envelope["signatures"][0]["keyid"]))
    public.verify(base64.b64decode(envelope["signatures"][0]["sig"]), signed)


def test_a_manifest_changed_after_signing_is_noticed(bundle: Path) -> None:
    sign_bundle(bundle, KEY)
    raw = (bundle / "manifest.json").read_bytes()
    (bundle / "manifest.json").write_bytes(raw.replace(b"2026-11-29", b"2026-11-28"))
    result = verify(bundle, judge)
    assert (result.state, result.signer) == (BundleState.BROKEN, None)
    assert "over another manifest.json" in said(result)


def test_a_signature_from_another_bundle_is_noticed(bundle: Path, tmp_path: Path) -> None:
    other = write_example(tmp_path / "other", only(example_plan(), lambda c: c.stage == "kernels"))
    sign_bundle(other, KEY)
    shutil.copyfile(other / "attestation.json", bundle / "attestation.json")
    assert "taken from another bundle" in said(verify(bundle, judge))


def test_a_payload_or_key_changed_after_signing_is_noticed(bundle: Path) -> None:
    sign_bundle(bundle, KEY)
    envelope = json.loads((bundle / "attestation.json").read_bytes())
    payload = base64.b64decode(envelope["payload"]).replace(b"FAILED", b"PASSED")
    forged = {**envelope, "payload": base64.b64encode(payload).decode()}
    (bundle / "attestation.json").write_bytes(canonical_bytes(forged))
    assert "does not hold" in said(verify(bundle, judge))
    stranger = Ed25519PrivateKey.generate().public_key().public_bytes_raw().hex()
    forged = {**envelope, "signatures": [{**envelope["signatures"][0], "keyid": stranger}]}
    (bundle / "attestation.json").write_bytes(canonical_bytes(forged))
    assert "does not hold" in said(verify(bundle, judge))


@pytest.mark.parametrize(
    "content", [b"{}", b"null", b"[", b'{"payload":"x","payloadType":"y","signatures":[]}']
)
def test_an_envelope_that_is_none_is_a_problem(bundle: Path, content: bytes) -> None:
    (bundle / "attestation.json").write_bytes(content)
    assert verify(bundle, judge).state is BundleState.BROKEN


def test_a_bundle_that_goes_on_loses_its_signature(bundle: Path) -> None:
    sign_bundle(bundle, KEY)
    with open_run(bundle, only(example_plan(), lambda c: c.stage == "audit")):
        assert not (bundle / "attestation.json").exists()


def test_an_unfinished_run_is_not_signed(tmp_path: Path) -> None:
    plan = only(example_plan(), lambda c: c.stage == "audit")
    open_run(tmp_path / "run", plan).close()
    with pytest.raises(EvidenceError, match="has not finished"):
        sign_bundle(tmp_path / "run", KEY)


def test_keys_are_ed25519_in_pem(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    path.write_bytes(KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    assert load_key(path).public_key().public_bytes_raw().hex() == SIGNER
    path.write_bytes(
        generate_private_key(SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    with pytest.raises(InputError, match="another kind of key"):
        load_key(path)
    path.write_text("nonsense")
    with pytest.raises(InputError, match="openssl genpkey"):
        load_key(path)
