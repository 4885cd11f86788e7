"""Signatures by an identity instead of a key: sigstore's, checked offline against a root of trust of one's
own.

`attestation.json` is then a Sigstore bundle: the DSSE envelope, the certificate that binds its key to an
identity, and the transparency log's word for when. The signer is that identity, `ISSUER SUBJECT`, as policies
name it under `signers`. Which authority and which logs count is the reader's word (`--trusted-root`), never
the bundle's. Needs the extra `sigstore`; checking needs no network, signing does.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from harness.domain.errors import EvidenceError, InputError
from harness.evidence.strict_json import parse_json

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

__all__ = ["check_keyless", "is_keyless", "sign_keyless"]

MEDIA_TYPE = "application/vnd.dev.sigstore.bundle"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
ISSUER = "1.3.6.1.4.1.57264.1.8"
"""Object identifier of the certificate extension that names the issuer of the identity (Fulcio, v2)."""
UTF8_STRING = 0x0C
EXTRA = "install it with `pip install 'fasttrack[sigstore]'`"


def is_keyless(raw: bytes) -> bool:
    """Whether an attestation is a Sigstore bundle; raises `EvidenceError` where it is no JSON."""
    value = parse_json(raw)
    return isinstance(value, dict) and str(value.get("mediaType", "")).startswith(MEDIA_TYPE)


def check_keyless(raw: bytes, trusted_root: Path) -> tuple[str, bytes]:
    """The signer and the signed payload; raises `EvidenceError` where certificate, log entry or signature do
    not hold, `InputError` where the root of trust cannot be read or sigstore is not installed.
    """
    try:
        from sigstore.errors import Error
        from sigstore.models import Bundle, InvalidBundle, TrustedRoot
        from sigstore.verify import Verifier
    except ImportError as error:
        raise InputError(f"checking a signature by identity needs sigstore ({error}); {EXTRA}") from error
    try:
        verifier = Verifier(trusted_root=TrustedRoot.from_file(str(trusted_root)))
    except (Error, OSError, ValueError) as error:
        raise InputError(
            f"{trusted_root}: no root of trust can be read here ({str(error)[:200]}); give sigstore's "
            "`trusted_root.json`"
        ) from error
    try:
        bundle = Bundle.from_json(raw)
        kind, payload = verifier.verify_dsse(bundle, _AnyIdentity())
        signer = _identity(bundle.signing_certificate)
    except (
        Error,
        InvalidBundle,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        raise EvidenceError(f"the signature by identity does not hold: {str(error)[:200]}") from None
    if kind != PAYLOAD_TYPE:
        raise EvidenceError(f"the signed payload is of type {kind[:80]!r}, no in-toto statement")
    return signer, payload


def sign_keyless(statement: bytes) -> bytes:
    """A Sigstore bundle over a statement, signed by the identity of the job that this runs in.

    Asks the public service of sigstore, and leaves the identity in its public log. Raises `InputError` where
    there is no identity, or sigstore refuses.
    """
    try:
        from sigstore.dsse import Statement
        from sigstore.errors import Error
        from sigstore.models import ClientTrustConfig
        from sigstore.oidc import IdentityToken, detect_credential
        from sigstore.sign import SigningContext
    except ImportError as error:
        raise InputError(f"signing by identity needs sigstore ({error}); {EXTRA}") from error
    try:
        token = detect_credential()
        if token is None:
            raise InputError(
                "this process has no identity to sign with; run in a CI job that may ask for one (on GitHub "
                "`permissions: id-token: write`), or sign with --key"
            )
        context = SigningContext.from_trust_config(ClientTrustConfig.production())
        with context.signer(IdentityToken(token)) as signer:
            return signer.sign_dsse(Statement(statement)).to_json().encode()
    except (Error, OSError) as error:
        raise InputError(f"sigstore did not sign: {str(error)[:200]}") from error


class _AnyIdentity:
    """Sigstore's policy that asks for no name: whose identity counts is the gate's question, asked of the
    policy's `signers` once it is known whose it is.
    """

    def verify(self, cert: "Certificate") -> None:
        """Accept."""


def _identity(certificate: "Certificate") -> str:
    """`ISSUER SUBJECT` of a certificate that was checked."""
    from cryptography.x509 import ObjectIdentifier, SubjectAlternativeName, UnrecognizedExtension

    extension = certificate.extensions.get_extension_for_oid(ObjectIdentifier(ISSUER)).value
    names = list(certificate.extensions.get_extension_for_class(SubjectAlternativeName).value)
    if not isinstance(extension, UnrecognizedExtension) or len(names) != 1:
        raise ValueError("the certificate names no issuer, or not one subject")
    words = (_utf8_string(extension.value), str(names[0].value))
    if not all(word.isascii() and word.isprintable() and " " not in word and word for word in words):
        raise ValueError("the certificate's identity is no plain text")
    return " ".join(words)


def _utf8_string(der: bytes) -> str:
    """Text of a DER UTF8String of at most 127 bytes, or 255 in the long form."""
    if len(der) > 2 and der[0] == UTF8_STRING and der[1] == len(der) - 2 and der[1] < 128:
        return der[2:].decode()
    if len(der) > 3 and der[:2] == bytes((UTF8_STRING, 0x81)) and der[2] == len(der) - 3:
        return der[3:].decode()
    raise ValueError("the certificate's issuer is no UTF8String")
