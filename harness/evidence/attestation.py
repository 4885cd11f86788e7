"""Who vouches for a bundle: an in-toto Statement v1 with a test-result predicate, in a DSSE envelope.

The subject is the manifest's digest, and the manifest binds every other file. The key id is the Ed25519
public key itself (hex), so that the signature can be checked from the envelope alone; whether that key
counts is the policy's word (`signers`). An unsigned bundle is legal and is shown as unsigned.

Formats: in-toto Attestation Framework v1 (Statement v1; predicate
`https://in-toto.io/attestation/test-result/v0.1`) and Dead Simple Signing Envelope 1.0.
"""

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.domain.check import Outcome, Status
from harness.domain.errors import EvidenceError, InputError
from harness.domain.record import Digest, canonical_bytes
from harness.evidence.keyless import check_keyless, is_keyless, sign_keyless
from harness.evidence.names import ATTESTATION, MANIFEST
from harness.evidence.reader import open_bundle
from harness.evidence.run_folder import write_atomically
from harness.evidence.strict_json import parse_json, read_bounded

__all__ = [
    "Envelope", "Statement", "check_attestation", "load_key", "make_statement", "sign_bundle",
    "sign_bundle_by_identity",
]  # fmt: skip

PAYLOAD_TYPE: Literal["application/vnd.in-toto+json"] = "application/vnd.in-toto+json"
STATEMENT_TYPE: Literal["https://in-toto.io/Statement/v1"] = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Literal["https://in-toto.io/attestation/test-result/v0.1"] = (
    "https://in-toto.io/attestation/test-result/v0.1"
)
MAX_ATTESTATION_BYTES = 32 * 2**20


class _Format(BaseModel):
    """Base of the foreign formats: frozen and closed like a `Record`, with the specifications' field
    names.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")


class Subject(_Format):
    """in-toto resource descriptor of the manifest."""

    name: Literal["manifest.json"] = "manifest.json"
    digest: dict[Literal["sha256"], Digest]


class Configuration(_Format):
    """in-toto resource descriptor of an input of the run."""

    name: str
    digest: dict[Literal["sha256"], Digest]


class TestResult(_Format):
    """The test-result predicate; field names are the specification's."""

    __test__ = False

    result: Literal["PASSED", "WARNED", "FAILED"]
    configuration: tuple[Configuration, ...]
    passed_tests: tuple[str, ...] = Field(alias="passedTests")
    warned_tests: tuple[str, ...] = Field(alias="warnedTests")
    failed_tests: tuple[str, ...] = Field(alias="failedTests")


class Statement(_Format):
    """in-toto Statement v1."""

    type: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    subject: tuple[Subject, ...] = Field(min_length=1, max_length=1)
    predicate_type: Literal["https://in-toto.io/attestation/test-result/v0.1"] = Field(alias="predicateType")
    predicate: TestResult


class Signature(_Format):
    """One DSSE signature."""

    keyid: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """The Ed25519 public key in hex."""
    sig: str
    """Standard base64."""


class Envelope(_Format):
    """`attestation.json`: a DSSE envelope."""

    payload: str
    """Standard base64 of the statement."""
    payload_type: Literal["application/vnd.in-toto+json"] = Field(alias="payloadType")
    signatures: tuple[Signature, ...] = Field(min_length=1, max_length=1)


def make_statement(folder: Path) -> bytes:
    """The statement about a finished bundle, canonical. Raises `EvidenceError` for an unfinished run."""
    bundle = open_bundle(folder)
    if bundle.manifest is None or bundle.digest is None:
        raise EvidenceError(f"{folder}: the run has not finished, so there is nothing to sign; use --resume")
    manifest = bundle.manifest
    statement = Statement(
        _type=STATEMENT_TYPE,
        subject=(Subject(digest={"sha256": bundle.digest}),),
        predicateType=PREDICATE_TYPE,
        predicate=_predicate(
            bundle.outcomes,
            tuple(
                Configuration(name=name, digest={"sha256": digest})
                for name, digest in (
                    ("claim", manifest.claim_digest),
                    ("policy", manifest.policy_digest),
                    ("plan", manifest.plan_digest),
                    ("harness", manifest.harness_digest),
                    ("pack", manifest.pack_digest),
                )
            ),
        ),
    )
    return canonical_bytes(statement.model_dump(mode="json", by_alias=True))


def load_key(path: Path) -> Ed25519PrivateKey:
    """Private key from an unencrypted PEM file; raises `InputError`."""
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InputError(
            f"{path}: no private key can be read here ({type(error).__name__}); make one with "
            f"`openssl genpkey -algorithm ed25519 -out {path.name}`"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"{path}: holds another kind of key; fasttrack signs with Ed25519")
    return key


def sign_bundle(folder: Path, key: Ed25519PrivateKey) -> str:
    """Write `attestation.json`; gives the signer, the public key in hex."""
    payload = make_statement(folder)
    signer = key.public_key().public_bytes_raw().hex()
    envelope = Envelope(
        payload=base64.b64encode(payload).decode(),
        payloadType=PAYLOAD_TYPE,
        signatures=(
            Signature(
                keyid=signer, sig=base64.b64encode(key.sign(_pre_authentication_encoding(payload))).decode()
            ),
        ),
    )
    write_atomically(folder / ATTESTATION, canonical_bytes(envelope.model_dump(mode="json", by_alias=True)))
    return signer


def sign_bundle_by_identity(folder: Path) -> None:
    """Write `attestation.json`, signed through sigstore by the identity of this job."""
    write_atomically(folder / ATTESTATION, sign_keyless(make_statement(folder)))


def check_attestation(
    path: Path, manifest_digest: str, outcomes: Sequence[Outcome], trusted_root: Path | None = None
) -> str | None:
    """The signer of a bundle: a public key in hex, or `ISSUER SUBJECT`; None for a signature by identity
    where nobody named a root of trust.

    Raises `EvidenceError` where the signature does not hold, or the statement is about another manifest or
    says other results than the outcomes.
    """
    raw = read_bounded(path, MAX_ATTESTATION_BYTES)
    if not is_keyless(raw):
        signer, payload = _check_key(raw)
    elif trusted_root is None:
        return None
    else:
        signer, payload = check_keyless(raw, trusted_root)
    _require_about(payload, manifest_digest, outcomes)
    return signer


def _check_key(raw: bytes) -> tuple[str, bytes]:
    """The signer and the payload of an envelope that a key signed."""
    envelope = _parse_envelope(raw)
    signature = envelope.signatures[0]
    try:
        payload = base64.b64decode(envelope.payload, validate=True)
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature.keyid)).verify(
            base64.b64decode(signature.sig, validate=True), _pre_authentication_encoding(payload)
        )
    except (InvalidSignature, binascii.Error, ValueError):
        raise EvidenceError(f"the signature by {signature.keyid[:16]}… does not hold") from None
    return signature.keyid, payload


def _require_about(payload: bytes, manifest_digest: str, outcomes: Sequence[Outcome]) -> None:
    """Raises unless a signed payload is the statement about this manifest and these outcomes."""
    parse_json(payload)
    try:
        statement = Statement.model_validate_json(payload, strict=True)
    except ValidationError as error:
        raise EvidenceError(f"the signed payload is no statement: {error.error_count()} faults") from None
    if statement.subject[0].digest["sha256"] != manifest_digest:
        raise EvidenceError(f"the signature is over another {MANIFEST}: it was taken from another bundle")
    if statement.predicate != _predicate(outcomes, statement.predicate.configuration):
        raise EvidenceError("the signed result is not what the outcomes say")


def _parse_envelope(raw: bytes) -> Envelope:
    try:
        return Envelope.model_validate_json(raw, strict=True)
    except ValidationError as error:
        raise EvidenceError(f"is no DSSE envelope with one signature: {error.error_count()} faults") from None


def _predicate(outcomes: Sequence[Outcome], configuration: tuple[Configuration, ...]) -> TestResult:
    failed = tuple(o.check for o in outcomes if o.status is Status.FAIL)
    warned = tuple(o.check for o in outcomes if o.status not in (Status.PASS, Status.FAIL))
    return TestResult(
        result="FAILED" if failed else "WARNED" if warned else "PASSED",
        configuration=configuration,
        passedTests=tuple(o.check for o in outcomes if o.status is Status.PASS),
        warnedTests=warned,
        failedTests=failed,
    )


def _pre_authentication_encoding(payload: bytes) -> bytes:
    """DSSE PAE: what is signed."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
