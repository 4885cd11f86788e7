"""Which kernels are audited: a check for each variant and GPU architecture of the claim.

An op without a variant for a claimed architecture gets a check that fails. Limits come from the pack's
committed expectations (`limits`) and the policy; waivers that hold today travel in the check, so that judging
needs nothing else.
"""

from datetime import date
from fnmatch import fnmatch

from harness.domain.cell import Arch, Cell
from harness.domain.check import Check, StageName, Threshold
from harness.domain.claim import Envelope
from harness.domain.pack import KernelVariant
from harness.domain.stage import PlanRequest
from harness.stages.audit.artifacts import compiler_missing
from harness.stages.audit.limits import limits_of

__all__ = ["chosen_variants", "plan", "sizes_text"]

COMPILE_COST_S = 1.0
"""Seconds a kernel adds to a cold run: 32 s of processor time to compile 39, 0.2 s to read one; half of that
on 2 cores where nothing else runs."""
READ_COST_S = 0.2
MAX_BLOCK = 1024
"""Most threads of a block on any architecture."""


def plan(request: PlanRequest) -> tuple[Check, ...]:
    """A check for each variant of the smoke set (all variants with `--full`), on each GPU architecture of the
    claim.
    """
    unavailable = compiler_missing()
    proof = request.policy.proof(StageName.AUDIT)
    subjects = proof.subjects if proof else ()
    variants = chosen_variants(request.pack.variants(), request.is_full)
    everywhere = {v.name: " ".join(v.architectures) for v in request.pack.variants()}
    checks: list[Check] = []
    for architecture in request.claim.envelope.architectures:
        if architecture.arch == "cpu":
            continue
        for op in dict.fromkeys([*(o.name for o in request.pack.ops()), *(v.op for v in variants)]):
            if subjects and op not in subjects:
                continue
            own = [v for v in variants if v.op == op and architecture.arch in v.architectures]
            checks += [
                _variant_check(request, v, architecture.arch, everywhere[v.name], unavailable) for v in own
            ]
            if not own:
                checks.append(_missing_check(op, architecture.arch, unavailable))
    return tuple(_with_compile_cost(checks))


def chosen_variants(variants: tuple[KernelVariant, ...], is_full: bool) -> tuple[KernelVariant, ...]:
    """All variants, or the smoke set: for each op and architecture what the pack marks, else the first."""
    if is_full:
        return variants
    marked = {(v.op, a) for v in variants if v.is_smoke for a in v.architectures}
    chosen: list[KernelVariant] = []
    for variant in variants:
        lacking = tuple(a for a in variant.architectures if (variant.op, a) not in marked)
        if variant.is_smoke:
            chosen.append(variant)
        elif lacking:
            chosen.append(variant.model_copy(update={"architectures": lacking}))
            marked |= {(variant.op, a) for a in lacking}
    return tuple(chosen)


def _variant_check(
    request: PlanRequest,
    variant: KernelVariant,
    architecture: Arch,
    architectures: str,
    unavailable: str | None,
) -> Check:
    limits: dict[str, float | int | str | bool] = {
        "max_unclassed": 0,
        "cluster": variant.max_cluster,
        "block_size": MAX_BLOCK,
        **limits_of(dict(variant.expected), architecture),
    }
    proof = request.policy.proof(StageName.AUDIT)
    limits |= dict(proof.thresholds) if proof else {}
    limits |= _waivers(request, variant.source)
    return Check(
        id=f"audit/{variant.name}/{architecture}",
        stage=StageName.AUDIT,
        proves="The compiled kernel touches only weights before its dependency wait, reads only weights "
        "non-coherently, and spills no registers.",
        cell=Cell(arch=architecture),
        op=variant.op,
        subject=variant.name,
        thresholds=tuple(Threshold(name=n, value=v) for n, v in limits.items()),
        parameters=(
            ("variant", variant.name),
            ("set", "full" if request.is_full else "smoke"),
            ("source", variant.source),
            ("sizes", sizes_text(variant, request.claim.envelope)),
            ("limits_file", variant.limits_file or None),
            ("architectures", architectures),
        ),
        cost_s=READ_COST_S,
        unavailable=unavailable,
    )


def sizes_text(variant: KernelVariant, envelope: Envelope) -> str:
    """Ranges of what the variant's grids depend on, over the whole envelope, such as `x.0=1..64`."""
    meanings = {
        "tokens": f"1..{envelope.max_rows_per_step}",
        "requests": f"{envelope.batch.min}..{envelope.batch.max}",
        "rows": f"{envelope.drafts.min + 1}..{envelope.drafts.max + 1}",
        "ranks": f"1..{max(envelope.tp) * max(envelope.dcp)}",
    }
    return " ".join(f"{place}={meanings.get(said, said)}" for place, said in variant.sizes)


def _missing_check(op: str, architecture: Arch, unavailable: str | None) -> Check:
    return Check(
        id=f"audit/{op}/{architecture}",
        stage=StageName.AUDIT,
        proves=f"Op {op} has a kernel for {architecture}.",
        cell=Cell(arch=architecture),
        op=op,
        parameters=(("variant", None), ("set", "smoke")),
        cost_s=0,
        unavailable=unavailable,
    )


def _with_compile_cost(checks: list[Check]) -> list[Check]:
    """The first variant's check carries the cost of compiling the set, as its sampling does the work."""
    first = next((i for i, c in enumerate(checks) if c.parameter("variant") is not None), None)
    if first is not None:
        count = sum(c.parameter("variant") is not None for c in checks)
        checks[first] = checks[first].model_copy(update={"cost_s": READ_COST_S + COMPILE_COST_S * count})
    return checks


def _waivers(request: PlanRequest, path: str) -> dict[str, str]:
    """Waivers of the policy that cover a kernel's source today, as thresholds of the check."""
    today = date.today()  # a waiver ends with a calendar day
    return {
        f"waived.{w.rule}": w.words()
        for w in request.policy.waivers
        if w.expires >= today and fnmatch(path, w.path)
    }
