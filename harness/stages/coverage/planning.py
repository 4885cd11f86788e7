"""Which coverage checks a claim calls for: every batch bucket, phase, context band, rank count, feature and
op, and what must decline.

A policy's proof may name `subjects`: the groups of checks that it requires, such as `path` or `feature`;
without them all that the claim derives are required. Its threshold `context_bands` says how long contexts
must be, and its `cells` name further cells that must not be empty (`demands`).
"""

from collections.abc import Iterator

from harness.domain.cell import Cell
from harness.domain.change import ChangedFile
from harness.domain.check import Check, StageName, Threshold
from harness.domain.claim import Envelope
from harness.domain.machine import Tier
from harness.domain.record import Scalar, Setting
from harness.domain.stage import PlanRequest
from harness.stages.coverage.demands import model_of, with_demands
from harness.stages.coverage.wanted import Wanted, steps_of

__all__ = ["path_cells", "plan"]

SHORT_CONTEXT = 24
"""Tokens before the first covered step: enough for conv windows, two MLA chunks and no more."""
LONG_RUN_STEPS = 112
"""A dispatcher that gives up after the first hundred steps must be seen doing so."""
COST_PER_ROW_S = 0.02
"""Measured on 2 cores with the nano model: one row of one step, all arms of a check."""
CAUSAL_STEPS = 16
"""Tokens that a feature writes for each prompt."""
CAUSAL_BATCH = 4
"""Questions of an eval, all at once: a single request may take other ops than several do."""
OTHER_COST_S = {"layer": 20.0, "rebuild": 8.0, "causal": 60.0}
"""A layer on an H200: weights in every layout, capture and traces of both arms; the first of a kind compiles.
Two builds: two processes that load torch side by side. Causal: thirteen arms over an eval's questions."""
DEFAULTS: dict[str, Setting] = {
    "clean_kl_margin": 4.0,
    "verify_kl_margin": 2.0,
    "max_ledger_share": 0.01,
    "min_tokens": 1,
    "resumed_kl": 1e-6,
    "context_bands": "24",
}
"""Where the policy names none. `clean_kl_margin`: a poisoned op counts as noticed when the median KL is this
many times the clean arms' median; between seeds the nano model's clean median moves by less than 2.
`verify_kl_margin`: kept rows may be that
much further from the oracle than rows decoded one by one; over 6 seeds the nano model's are nearer it.
`min_tokens`: what the optimised path must generate for a cell not to be empty. `resumed_kl`: a prefix hit and
a used slot repeat the same sums in the same order."""
POISON_SCALE = 2.0
"""Factor on every other output value of a poisoned op."""
TRANSITIONS = ("optimised_stock_optimised", "batch_grows", "prefill_joins", "draft_rejected")
FEATURES = {"temperature_sampling": "temperature_sampling", "structured_output": "structured_output"}
"""Claimed features that a check of its own shows, beside prefix hits, verify steps and long contexts."""
LAYER_CELLS = ((8, 1, 1024), (8, 8, 1024))
"""(tp, batch, context) of the full-width layers that are traced on a GPU."""
TRACED_LAYERS = 3


def plan(request: PlanRequest) -> tuple[Check, ...]:
    """Path checks over bucket edges and phases, declines, poisons, transitions, features and isolation."""
    wanted = _all_wanted(request)
    return tuple(_check(request, each) for each in with_demands(request, list(wanted)))


def path_cells(
    envelope: Envelope, arch: str, contexts: tuple[int, ...] = (SHORT_CONTEXT,), ranks: tuple[int, ...] = ()
) -> tuple[Cell, ...]:
    """Bucket edges in decode, the smallest batch in longer contexts, two requests on several ranks, and
    verify at fewest and most drafts where the joint limit admits a batch.
    """
    short = {"arch": arch, "context": SHORT_CONTEXT}
    cells = [{**short, "batch": edge} for edge in sorted({envelope.batch.min, *envelope.batch_buckets})]
    longer = [context for context in contexts if context > SHORT_CONTEXT]
    cells += [{**short, "batch": envelope.batch.min, "context": context} for context in longer]
    cells += [{**short, "batch": 2, "tp": tp} for tp in ranks]
    for drafts in sorted({max(1, envelope.drafts.min), envelope.drafts.max}):
        for batch in sorted({envelope.batch.min, envelope.max_rows_per_step // (drafts + 1)}):
            cells.append({**short, "batch": batch, "drafts": drafts, "phase": "verify"})
    return tuple(cell for fields in cells if envelope.admits(cell := Cell.model_validate(fields)))


def _all_wanted(request: PlanRequest) -> Iterator[Wanted]:
    envelope, arch = request.claim.envelope, request.machine.arch
    base = Cell.model_validate({"arch": arch, "batch": 2, "context": SHORT_CONTEXT})
    if arch != "cpu":
        yield from _layer_wanted(request, arch)
    yield from _path_wanted(request, base)
    reasons = (("is_drawn", False), ("reasons", " ".join(request.pack.decline_reasons())))
    for reason, cell in _decline_cells(envelope, arch):
        yield Wanted(
            "decline", reason, cell,
            "outside the envelope the step is declined with a reason code and answers exactly as stock does",
            more=reasons,
        )  # fmt: skip
    has_verify = "verify" in envelope.phases and envelope.drafts.max >= 3
    if has_verify:
        yield Wanted(
            "uneven", "uneven_drafts", base.model_copy(update={"phase": "verify", "drafts": 3}),
            "a step whose requests have unlike numbers of drafts is declined and answers as stock does",
            more=reasons,
        )  # fmt: skip
    for op in request.pack.ops():
        yield Wanted(
            "poison", op.name, base,
            "making this op visibly wrong changes the drift eval, so the eval covers it", op=op.name,
        )  # fmt: skip
    for name in TRANSITIONS:
        if name != "draft_rejected" or has_verify:
            yield Wanted(
                "transition", name, base,
                "switching between the paths inside a request gives what never switching gives",
            )  # fmt: skip
    yield from _request_wanted(request, base, has_verify=has_verify)
    if touched := _touched(request):
        yield Wanted(
            "rebuild", "base_and_head", base,
            "the builds of base and head differ in what the diff touches, and in nothing else",
            more=(("is_drawn", False), ("touched", "\n".join(touched))),
        )  # fmt: skip
    yield Wanted(
        "state", "declared_writes", base,
        "a decode step writes only the state that the claim declares, and leaves the process as it was",
    )  # fmt: skip
    yield Wanted(
        "ledger", "cost", base, "keeping the ledger costs less than the allowed share of a decode step",
        steps=24,
    )  # fmt: skip
    yield from _causal_wanted(request, base)


def _causal_wanted(request: PlanRequest, base: Cell) -> Iterator[Wanted]:
    """A check an eval, in full runs and on a GPU: the embedded tasks, and the features that choose tokens. An
    eval may be blind to an op that others see; that is worth knowing and stops nobody.
    """
    if not request.is_full and request.machine.arch == "cpu":
        return
    proves = "making each op visibly wrong changes this eval's answers, so the eval covers it"
    small = request.pack.smoke_model
    columns: list[tuple[str, str, int | None]] = []
    columns += [(task.name, task.model, task.stop_token) for task in request.pack.eval_tasks()]
    columns += [(name, small, None) for name in request.claim.features if name in FEATURES]
    for name, model, stop in columns:
        yield Wanted(
            "causal", name, base.model_copy(update={"batch": CAUSAL_BATCH}), proves, steps=CAUSAL_STEPS,
            more=(("is_drawn", False), ("stop_token", stop)), model=model, is_optional=True,
        )  # fmt: skip


def _touched(request: PlanRequest) -> tuple[str, ...]:
    """Files of the pack that the change touches; none where there is no other build, as of a new pack."""
    prefix = request.pack.repository_prefix
    files = [f for f in request.change.files if f.path.startswith(prefix) or _before(f).startswith(prefix)]
    claim = prefix + request.pack.claim_file().relative_to(request.pack.root).as_posix()
    if any(f.path == claim and f.status == "added" for f in files):
        return ()
    names = {name for f in files for name in (f.path, _before(f)) if name.startswith(prefix)}
    return tuple(sorted(names))


def _before(file: ChangedFile) -> str:
    """Where a file of head was at base, if it moved: a copy leaves its source as it was."""
    return file.old_path or "" if file.status == "renamed" else ""


def _path_wanted(request: PlanRequest, base: Cell) -> Iterator[Wanted]:
    envelope, arch = request.claim.envelope, request.machine.arch
    proves = (
        "inside the envelope the optimised path runs in this cell, by ledger, counters and the kernels "
        "of a trace alike"
    )
    bands = tuple(int(band) for band in str(_limits(request)["context_bands"]).split(","))
    played = [tp for tp in envelope.tp if tp > 1 and request.pack.model_of_ranks(tp)]
    if arch == "cpu" and not request.is_full:
        played = played[:2]  # a CPU runs the ranks one after the other
    for cell in path_cells(envelope, arch, bands, tuple(played)):
        more = (("is_drawn", cell == base),)
        yield Wanted("path", cell.label(), cell, proves, more=more, model=model_of(cell, request.pack))
    long_run = base.model_copy(update={"batch": envelope.batch.min})
    yield Wanted(
        "path", "long_run", long_run, f"{proves}, in each of {LONG_RUN_STEPS} steps", steps=LONG_RUN_STEPS
    )
    for ranks in envelope.tp:
        if ranks > 1:
            yield Wanted(
                "collective", f"sum.tp{ranks}", base,
                "a sum over ranks holds each rank's part once, is rounded once, and is alike on all ranks",
                more=(("ranks", ranks),),
            )  # fmt: skip


def _request_wanted(request: PlanRequest, base: Cell, *, has_verify: bool) -> Iterator[Wanted]:
    features = request.claim.features
    if has_verify:
        yield Wanted(
            "verify", "kept_rows", base.model_copy(update={"phase": "verify", "drafts": 3}),
            "rows kept of a verify step are as near the oracle as decoding one by one",
        )  # fmt: skip
    if "prefix_caching" in features:
        yield Wanted(
            "prefix", "hit", base, "a prompt that finds its prefix answers as it does cold, and did find it"
        )
    yield Wanted("reuse", "slot", base, "a slot that another request left answers as a fresh one")
    names = [name for name in features if name in FEATURES]
    for name in [*names, "chunked_prefill"]:
        yield Wanted(
            "feature", name, base,
            "the feature's tokens come from the optimised path, and stock agrees along them",
        )  # fmt: skip


def _layer_wanted(request: PlanRequest, arch: str) -> Iterator[Wanted]:
    """One kind after the other, as the weights of two do not fit beside each other; first in the plan, as
    stock's kernels must be loaded ahead of the pack's.
    """
    for kind in request.pack.layer_kinds():
        for tp, batch, context in LAYER_CELLS:
            cell = Cell.model_validate({"arch": arch, "tp": tp, "batch": batch, "context": context})
            if request.claim.envelope.admits(cell):
                yield Wanted(
                    "layer", f"{kind}.tp{tp}.b{batch}", cell,
                    "inside a graph replay of full-width layers the declared kernels ran and no others",
                    more=(
                        ("layer_kind", kind), ("layout", "whole"), ("layers", TRACED_LAYERS),
                        ("is_drawn", True),
                    ),
                )  # fmt: skip


def _decline_cells(envelope: Envelope, arch: str) -> Iterator[tuple[str, Cell]]:
    """Cells just outside the envelope, named by the side that they leave it on."""
    short = {"arch": arch, "context": SHORT_CONTEXT}
    yield "batch_above_max", Cell.model_validate({**short, "batch": envelope.batch.max + 1})
    drafts = envelope.drafts.max
    batch = envelope.max_rows_per_step // (drafts + 1) + 1
    if drafts > 0 and batch in envelope.batch and "verify" in envelope.phases:
        over_rows = {**short, "batch": batch, "drafts": drafts, "phase": "verify"}
        yield "rows_above_max", Cell.model_validate(over_rows)
    yield "prefill", Cell.model_validate({**short, "batch": 2, "phase": "prefill"})


def _limits(request: PlanRequest) -> dict[str, Setting]:
    proof = request.policy.proof(StageName.COVERAGE)
    overrides = dict(proof.thresholds) if proof is not None else {}
    return {**DEFAULTS, "min_path_share": request.policy.min_path_share, **overrides}


def _check(request: PlanRequest, wanted: Wanted) -> Check:
    cell, kind = wanted.cell, wanted.kind
    proof = request.policy.proof(StageName.COVERAGE)
    subjects = proof.subjects if proof is not None else ()
    steps = wanted.steps or steps_of(wanted)
    missing = wanted.unavailable
    if request.claim.envelope.level(cell.arch) != "dispatched":
        missing = f"the claim does not dispatch on {cell.arch}"
    parameters: tuple[tuple[str, Scalar], ...] = (
        ("kind", kind), ("model", wanted.model or request.pack.smoke_model), ("seed", request.seed),
        ("steps", steps), ("poison_scale", POISON_SCALE),
        ("implementation", "cpu" if cell.arch == "cpu" else "cute"),
        ("is_traced", kind == "path" and wanted.name != "long_run"),
        *(wanted.more or (("is_drawn", False),)),
    )  # fmt: skip
    limits = _limits(request)
    if wanted.min_tokens is not None:
        limits["min_tokens"] = max(wanted.min_tokens, int(limits["min_tokens"]))
    return Check(
        id=f"coverage/{kind}/{wanted.name}",
        stage=StageName.COVERAGE,
        proves=wanted.proves,
        cell=cell,
        op=wanted.op,
        subject=wanted.subject or wanted.name,
        thresholds=tuple(Threshold(name=key, value=value) for key, value in sorted(limits.items())),
        parameters=parameters,
        tier=Tier.SMOKE if cell.arch == "cpu" else Tier.RANK,
        is_required=wanted.is_demanded or kind in subjects or (not subjects and not wanted.is_optional),
        cost_s=OTHER_COST_S[kind]
        if kind in OTHER_COST_S
        else 0.3 + COST_PER_ROW_S * cell.rows * cell.tp * steps / 3 + cell.context * 0.001,
        unavailable=missing,
    )
