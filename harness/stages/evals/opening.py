"""Which engine answers a check, and how its arms open.

The one place that knows engines by name. What an arm is asked for comes from the check's parameters alone, so
that a plan says how it will be asked.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from harness.domain.check import Check
from harness.domain.claim import Claim
from harness.domain.errors import InputError
from harness.domain.pack import SessionRequest
from harness.domain.resources import data_folder
from harness.domain.stage import StageContext
from harness.engines.served import FILE_VARIABLE, ServerSettings, load_settings
from harness.engines.serving import Ask, Engine
from harness.engines.speculation import speculative_of
from harness.engines.text_codec import ByteCodec, TextCodec, WordCodec, load_words
from harness.engines.vllm_server import VllmServer
from harness.stages.evals.asking import Journal

__all__ = [
    "arm_request", "claim_objection", "closing_engine", "codec_of", "journal_of", "open_engine",
    "open_server", "words_file",
]  # fmt: skip

SLACK_TOKENS = 16
"""Room behind the longest answer, for drafts and for an answer that goes on too long."""


def arm_request(check: Check, max_requests: int, max_context: int) -> SessionRequest:
    """The stock arm's session; other arms differ in arm and poison."""
    asked = dict(check.parameters)
    return SessionRequest.model_validate(
        {
            "model": asked["model"],
            "seed": asked["seed"],
            "arm": "stock",
            "implementation": asked["implementation"],
            "poison_scale": asked["poison_scale"],
            "kept_prefixes": asked.get("kept_prefixes", 0),
            "max_requests": max_requests,
            "max_context": max_context,
        }
    )


def open_engine(
    check: Check, context: StageContext, codec: TextCodec, asks: Sequence[Ask], most_at_once: int
) -> Engine:
    """The engine that the check asks for, with room for these requests; raises `InputError` for one that is
    not here.
    """
    name = str(dict(check.parameters).get("engine", "in-process"))
    if name == "vllm":
        return open_server(check, context)
    if name != "in-process":
        raise InputError(f"{check.id} asks for the engine {name!r}, which this version does not have")
    from harness.engines.in_process_engine import InProcessEngine  # loads torch; planning and judging do not

    room = max(len(codec.encode(ask)) + ask.max_tokens for ask in asks) + SLACK_TOKENS
    request = arm_request(check, most_at_once, room)
    ops = context.pack.ops()
    return InProcessEngine(context.pack, request, codec, ops[0].name if ops else None)


def open_server(check: Check, context: StageContext) -> VllmServer:
    """The servers that the settings file names; raises `InputError` where none is named."""
    place = os.environ.get(FILE_VARIABLE)
    if place is None:
        raise InputError(
            f"{check.id} asks a server, and nobody says which; write its settings into a file (see "
            "harness/engines/README.md) and name it with `--server FILE`"
        )
    settings = load_settings(Path(place))
    if settings.is_started and (unlike := claim_objection(settings, context.claim)) is not None:
        raise InputError(f"{place}: {unlike}; serve as the claim says, or claim what is served")
    part = hashlib.sha256(f"{check.digest()}:{context.change.head}".encode()).hexdigest()[:16]
    return VllmServer(settings, context.logs / part, context.cache / "servers" / part)


def claim_objection(settings: ServerSettings, claim: Claim) -> str | None:
    """Where servers draft otherwise than the claim says, or more; None where they do not. Pure."""
    found = speculative_of((*settings.common, *settings.stock.arguments))
    if found is None:
        return None
    if found.drafts not in claim.envelope.drafts:
        limits = claim.envelope.drafts
        return f"the servers make {found.drafts} drafts, and the claim takes {limits.min} to {limits.max}"
    said = claim.speculation
    if said is None:
        return None
    pairs = [(said.method, found.method), (said.draft_sampling, found.draft_sampling)]
    if found.is_synthetic:
        is_known = found.forced_length is None or found.forced_length in said.synthetic_lengths
        if not is_known:
            return f"the claim forces no acceptance of {found.forced_length:g}"
    else:
        pairs.append((said.rejection, found.rejection))
    unlike = [f"{own} where the claim says {wanted}" for wanted, own in pairs if wanted not in (None, own)]
    return f"the servers draft by {', '.join(unlike)}" if unlike else None


@contextmanager
def closing_engine(engine: Engine) -> Iterator[Engine]:
    """The engine, and the end of whatever it keeps running."""
    try:
        yield engine
    finally:
        close = getattr(engine, "close", None)
        if close is not None:
            close()


def codec_of(model: str) -> TextCodec:
    """How a preset of a pack reads text: by its word list beside the evals, else by bytes."""
    path = words_file(model)
    return WordCodec(load_words(path)) if path.is_file() else ByteCodec()


def words_file(model: str) -> Path:
    """Where a model's word list lies, if it has one."""
    return data_folder("evals") / model / "words.json"


def journal_of(check: Check, context: StageContext, part: str) -> Journal:
    """Where answers are kept until the check is done: apart for each run, pack and question."""
    key = f"{check.digest()}:{context.ledger.resolve()}:{context.change.head}:{part}"
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    return Journal(context.cache / "evals" / "journal" / f"{name}.jsonl")
