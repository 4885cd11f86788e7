"""A certificate authority, a certificate log and a transparency log of our own, for signatures by identity.

Everything that sigstore's public service would answer is made here with fresh keys: nothing is asked of it.
"""

import base64
import hashlib
import json
import struct
from datetime import UTC, datetime, timedelta
from typing import Any

import rfc8785
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

__all__ = ["ISSUER", "SUBJECT", "OwnSigstore"]

ISSUER = "https://token.actions.githubusercontent.com"
SUBJECT = "https://github.com/example/vllm/.github/workflows/evidence.yml@refs/heads/main"
NOW = datetime(2026, 11, 29, 20, 30, tzinfo=UTC)
SCT_LIST = x509.ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
TYPE = "application/vnd.in-toto+json"


def _b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _spki(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _sign(key: ec.EllipticCurvePrivateKey, data: bytes) -> bytes:
    return key.sign(data, ec.ECDSA(hashes.SHA256()))


class OwnSigstore:
    """Authority and logs with fresh keys."""

    def __init__(self) -> None:
        self.ca, self.ct, self.log = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "own authority")])
        self.root = (
            self._builder(self.name, self.ca, timedelta(days=365))
            .add_extension(x509.BasicConstraints(True, 0), critical=True)
            .add_extension(_usage(key_cert_sign=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self.ca.public_key()), critical=False)
            .sign(self.ca, hashes.SHA256())
        )

    def trusted_root(self) -> str:
        """`trusted_root.json`."""
        since = {"start": "2020-01-01T00:00:00Z"}

        def of_log(key: ec.EllipticCurvePrivateKey) -> dict[str, Any]:
            spki = _spki(key)
            return {
                "baseUrl": "https://log.invalid", "hashAlgorithm": "SHA2_256",
                "publicKey": {
                    "rawBytes": _b64(spki), "keyDetails": "PKIX_ECDSA_P256_SHA_256", "validFor": since,
                },
                "logId": {"keyId": _b64(hashlib.sha256(spki).digest())},
            }  # fmt: skip

        certificate = {"rawBytes": _b64(self.root.public_bytes(Encoding.DER))}
        authority = {
            "subject": {"organization": "own", "commonName": "own authority"}, "uri": "https://ca.invalid",
            "certChain": {"certificates": [certificate]}, "validFor": since,
        }  # fmt: skip
        return json.dumps(
            {
                "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
                "tlogs": [of_log(self.log)], "certificateAuthorities": [authority],
                "ctlogs": [of_log(self.ct)], "timestampAuthorities": [],
            }
        )  # fmt: skip

    def sign(self, payload: bytes, issuer: str = ISSUER, subject: str = SUBJECT) -> bytes:
        """A Sigstore bundle over a payload, by the identity."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._certificate(key, issuer, subject)
        kind = TYPE.encode()
        signature = _sign(key, b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload))
        bundle = {
            "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
            "verificationMaterial": {
                "certificate": {"rawBytes": _b64(certificate.public_bytes(Encoding.DER))},
                "tlogEntries": [self._entry(payload, signature, certificate)],
            },
            "dsseEnvelope": {
                "payload": _b64(payload), "payloadType": TYPE,
                "signatures": [{"sig": _b64(signature), "keyid": ""}],
            },
        }  # fmt: skip
        return json.dumps(bundle).encode()

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, life: timedelta
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - timedelta(minutes=1))
            .not_valid_after(NOW + life)
        )

    def _certificate(self, key: ec.EllipticCurvePrivateKey, issuer: str, subject: str) -> x509.Certificate:
        issued = issuer.encode()
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.ca.public_key())
        builder = (
            self._builder(x509.Name([]), key, timedelta(minutes=10))
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
            .add_extension(authority, critical=False)
            .add_extension(
                x509.SubjectAlternativeName([x509.UniformResourceIdentifier(subject)]), critical=True
            )
            .add_extension(
                x509.UnrecognizedExtension(
                    x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.8"), bytes((12, len(issued))) + issued
                ),
                critical=False,
            )
        )
        tbs = builder.sign(self.ca, hashes.SHA256()).tbs_certificate_bytes
        return builder.add_extension(
            x509.UnrecognizedExtension(SCT_LIST, self._timestamp(tbs)), critical=False
        ).sign(self.ca, hashes.SHA256())

    def _timestamp(self, tbs: bytes) -> bytes:
        """The extension that holds one signed certificate timestamp (RFC 6962, section 3.2)."""
        when = int(NOW.timestamp() * 1000)
        entry = hashlib.sha256(_spki(self.ca)).digest() + len(tbs).to_bytes(3) + tbs
        signed = struct.pack("!BBQH", 0, 0, when, 1) + entry + b"\0\0"
        signature = _sign(self.ct, signed)
        sct = b"\0" + hashlib.sha256(_spki(self.ct)).digest() + when.to_bytes(8) + b"\0\0\4\3"
        sct += len(signature).to_bytes(2) + signature
        listed = len(sct).to_bytes(2) + sct
        value = len(listed).to_bytes(2) + listed
        return (
            b"\x04" + bytes((len(value),)) if len(value) < 128 else b"\x04\x81" + bytes((len(value),))
        ) + value

    def _entry(self, payload: bytes, signature: bytes, certificate: x509.Certificate) -> dict[str, Any]:
        """An entry of a log that holds nothing else, with its promise and proof."""
        body = rfc8785.dumps(
            {
                "apiVersion": "0.0.1", "kind": "dsse",
                "spec": {
                    "envelopeHash": {"algorithm": "sha256", "value": "0" * 64},
                    "payloadHash": {"algorithm": "sha256", "value": hashlib.sha256(payload).hexdigest()},
                    "signatures": [
                        {
                            "signature": _b64(signature),
                            "verifier": _b64(certificate.public_bytes(Encoding.PEM)),
                        }
                    ],
                },
            }
        )  # fmt: skip
        log_id, when = hashlib.sha256(_spki(self.log)).digest(), int(NOW.timestamp())
        promise: dict[str, Any] = {
            "body": _b64(body),
            "integratedTime": when,
            "logID": log_id.hex(),
            "logIndex": 0,
        }
        leaf = hashlib.sha256(b"\0" + body).digest()
        note = f"own log\n1\n{_b64(leaf)}\n"
        signed = f"{note}\n\u2014 own {_b64(log_id[:4] + _sign(self.log, note.encode()))}\n"
        return {
            "logIndex": "0", "logId": {"keyId": _b64(log_id)},
            "kindVersion": {"kind": "dsse", "version": "0.0.1"}, "integratedTime": str(when),
            "inclusionPromise": {"signedEntryTimestamp": _b64(_sign(self.log, rfc8785.dumps(promise)))},
            "inclusionProof": {
                "logIndex": "0", "rootHash": _b64(leaf), "treeSize": "1", "hashes": [],
                "checkpoint": {"envelope": signed},
            },
            "canonicalizedBody": _b64(body),
        }  # fmt: skip


def _usage(digital_signature: bool = False, key_cert_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature, False, False, False, False, key_cert_sign, key_cert_sign, False, False
    )
