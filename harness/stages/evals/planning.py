"""Which evals a claim calls for, at which batch and context, so that small-batch kernels are graded at small
batch.

A policy names evals by subject (`drift`, `mrcr_canary`) or by group (`features`, all that the claim
promises). Where it names none, drift and the pack's embedded tasks are asked; official tasks need a model
that serves them, so they are asked only by name: `mrcr` and `aime25` over the official data on the claimed
model, with `_fixture` over generated data in a small model's words, with `_local` over a file that somebody
brought.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise

from harness.domain.cell import Cell
from harness.domain.check import Check, StageName, Threshold
from harness.domain.claim import Envelope
from harness.domain.errors import InputError
from harness.domain.machine import Tier
from harness.domain.pack import EvalTask
from harness.domain.policy import Proof
from harness.domain.record import Scalar
from harness.domain.stage import PlanRequest
from harness.engines.text_codec import load_words
from harness.stages.evals.conduct import CONDUCT_SHARE, SOFT_CONDUCT
from harness.stages.evals.data import sources
from harness.stages.evals.features import FEATURES
from harness.stages.evals.needs import with_needs
from harness.stages.evals.opening import words_file
from harness.stages.evals.questions import BANDS

__all__ = ["DEFAULTS", "ENGINE", "FORMS", "OFFICIAL", "drift_tokens", "plan"]

DEFAULTS: dict[str, float] = {
    "drift_factor": 2.0,
    "drift_floor_kl": 1e-9,
    "drift_slope_factor": 2.0,
    "length_band": 2.0,
    "margin": 0.03,
    "min_acceptance_ratio": 0.9,
    "min_top1_agreement": 0.99,
    "near_tie_nats": 0.05,
    "poison_items": 1,
    "spread_factor": 2.0,
    "spread_floor_nats": 0.05,
}
"""Thresholds where the policy names none. `drift_factor`: the optimised arm's mean KL to the oracle over
stock's own; `margin`: the loss of score that non-inferiority must exclude; `length_band`: factor by which
answers may be longer or shorter on average; `near_tie_nats`: a gap at which bf16 alone may turn a token;
`spread_*`: how far log-probabilities may move between two runs of one request, over stock's own."""
DRIFT_STEPS = 96
DRIFT_STEPS_FULL = 1024
DRIFT_COST_S = 14.0
"""Measured on 2 cores with the nano model, three arms and the poisoned one."""
BATCH = 8
PROMPT_COST_S, STEP_COST_S = 0.5, 0.03
"""Measured on 2 cores with the canary model: a prompt through one arm, and a decode step of up to a batch."""
OFFICIAL: Mapping[str, tuple[str, ...]] = {
    "mrcr": ("mrcr_2needle", "mrcr_4needle", "mrcr_8needle"),
    "aime25": ("aime25",),
}
"""Official tasks by subject."""
LEAST_SCORES = {"mrcr": 0.2, "aime25": 0.5}
"""What stock must reach on the official data; published scores of large models lie well above."""
MRCR_EACH, MRCR_EACH_FULL = 20, 100
"""Questions a band; the data has 100."""
AIME_REPEATS, AIME_REPEATS_FULL = 8, 36
"""36 repeats of 30 problems see a loss of 3 points from 0.93 in unpaired arms; pairs need fewer."""
AIME_TEMPERATURE = 0.6
MAX_TOKENS = {"mrcr": 16384, "aime25": 32768}
"""lm-eval's own limit for AIME25; room for MRCR's answers, of some thousand tokens, behind some reasoning."""
FIXTURE_TOKENS = {"mrcr": (32, 32), "aime25": (520, 4040)}
"""Longest answers of the generated questions, smoke and full."""
FIXTURE_ITEMS = {"mrcr": (8, 192), "aime25": (4, 96)}
FEATURE_ITEMS = {
    "temperature_sampling": 6, "structured_output": 4, "stop_handling": 2, "full_context": 3,
    "prefix_caching": 1, "batch_mates": 4,
}  # fmt: skip
FEATURE_TOKENS = {
    "temperature_sampling": 14, "structured_output": 64, "stop_handling": 16, "full_context": 32,
    "prefix_caching": 8, "batch_mates": 8,
}  # fmt: skip
PROMISED = {
    "temperature_sampling": "temperature_sampling", "structured_output": "structured_output",
    "full_context": "full_context", "prefix_caching": "prefix_caching",
}  # fmt: skip
"""Features of a claim and what shows them; stop texts and batch mates are asked of every claim."""
DRAWS_WEIGHT = 0.05
SERVER_COST_S = 240.0
"""Two servers of a small model come up, on 2 cores that do other things too."""
FEATURE_COST_S = 4.0
"""Measured on 2 cores, the dearest of the six."""
FORMS = ("fixture", "local", "served")
"""Of an eval, by where its rows or its models come from."""
ENGINE = "engine"
ENGINE_BATCHES, ENGINE_TOLD = (1, 2, 4, 8, 16), (1, 8)
"""Batches that engines are measured at, and those whose log-probabilities are kept."""
ENGINE_COST_S = 220.0
"""Six engines of one rank's shapes, two at a time, on an H200."""
NO_ENGINE = "the claimed model needs a server, and vllm is not installed here"


def plan(request: PlanRequest) -> tuple[Check, ...]:
    """What the policy names; drift and embedded tasks where it names nothing."""
    proof = request.policy.proof(StageName.EVALS)
    wanted = set(proof.subjects) if proof is not None else set()
    checks = list(_all_checks(request, wanted))
    if proof is not None:
        _require_known(request, proof, {str(check.subject) for check in checks})
    weights = {check.id: _weight(check) for check in checks}
    share = request.policy.statistics.family_false_alarm / (sum(weights.values()) or 1.0)
    checks = [_with_alarm(c, share, weights[c.id]) if weights[c.id] else c for c in checks]
    return tuple(with_needs(request, check) for check in checks)


def _require_known(request: PlanRequest, proof: Proof, planned: set[str]) -> None:
    """A demand of an eval that no claim has would never be held against anything."""
    names = {*OFFICIAL, *FEATURES, "drift", ENGINE, *(task.name for task in request.pack.eval_tasks())}
    known = planned | names | {f"{name}_{form}" for name in names for form in FORMS}
    unknown = sorted({name for demand in proof.cells for name in demand.evals} - known)
    if unknown:
        raise InputError(
            f"policy {request.policy.name!r} demands cells of {unknown[0]!r}, and there is none; there "
            f"are {', '.join(sorted(names))}"
        )


def drift_tokens(is_full: bool) -> int:
    """Positions along which drift is measured."""
    return DRIFT_STEPS_FULL if is_full else DRIFT_STEPS


def _all_checks(request: PlanRequest, wanted: set[str]) -> Iterator[Check]:
    arch = request.machine.arch
    missing = None
    if request.claim.envelope.level(arch) != "dispatched":
        missing = f"the claim does not dispatch on {arch}"
    if not wanted or "drift" in wanted:
        yield _drift(request, arch, missing)
    if "drift_local" in wanted:
        check = _drift(request, arch, missing)
        own = {"id": f"evals/drift_local/{request.pack.smoke_model}", "subject": "drift_local"}
        yield check.model_copy(update={**own, "parameters": (*check.parameters, ("text", "local"))})
    tasks = request.pack.eval_tasks()
    yield from (_task(request, t, arch, missing) for t in tasks if not wanted or t.name in wanted)
    for subject in OFFICIAL:
        if subject in wanted:
            yield from _official(request, subject, arch)
        if f"{subject}_fixture" in wanted:
            yield from (_fixture(request, subject, model, arch, missing) for model in _wordy(tasks))
        if f"{subject}_local" in wanted:
            yield _local(request, subject, arch, missing)
        if f"{subject}_served" in wanted:
            yield _served(_local(request, subject, arch, None))
    for name in FEATURES:
        is_promised = PROMISED.get(name, name) in request.claim.features or name not in PROMISED
        if name in wanted or ("features" in wanted and is_promised):
            yield from _feature(request, name, arch, missing)
        if f"{name}_served" in wanted or ("features_served" in wanted and is_promised):
            yield from map(_served, _feature(request, name, arch, None))
    if f"{ENGINE}_served" in wanted:
        yield _engine(request, arch)


def _wordy(tasks: tuple[EvalTask, ...]) -> tuple[str, ...]:
    """Trained models with a word list, in which data can be generated."""
    return tuple(dict.fromkeys(t.model for t in tasks if words_file(t.model).is_file()))


def _weight(check: Check) -> float:
    """How much of the policy's false alarms a check may take; 0 where chance cannot fail it. Draws need
    little: a wrong distribution gives a p-value far below any share. What a comparison of scores may take
    beside the scores is for its tests of conduct.
    """
    if check.subject == "temperature_sampling":
        return DRAWS_WEIGHT
    return 1.0 + CONDUCT_SHARE * len(SOFT_CONDUCT) if check.parameter("kind") in ("task", "official") else 0.0


def _with_alarm(check: Check, share: float, weight: float) -> Check:
    """The check with its share, unless the policy sets it."""
    if any(t.name == "false_alarm" for t in check.thresholds):
        return check
    own = share * (DRAWS_WEIGHT if weight == DRAWS_WEIGHT else 1.0)
    thresholds = (*check.thresholds, Threshold(name="false_alarm", value=own))
    return check.model_copy(update={"thresholds": tuple(sorted(thresholds, key=lambda t: t.name))})


def _drift(request: PlanRequest, arch: str, missing: str | None) -> Check:
    steps = drift_tokens(request.is_full)
    parameters: tuple[tuple[str, Scalar], ...] = (
        ("kind", "drift"), ("model", request.pack.smoke_model), ("seed", request.seed), ("steps", steps),
        ("prompt", 16), ("poison_scale", 1.05), ("implementation", _implementation(arch)),
    )  # fmt: skip
    cell = Cell.model_validate({"arch": arch, "batch": 2, "context": 16 + steps})
    return Check(
        id=f"evals/drift/{request.pack.smoke_model}",
        stage=StageName.EVALS,
        proves="along a text the optimised path stays as near the float64 oracle as stock, without growth",
        cell=cell,
        subject="drift",
        thresholds=_thresholds(request),
        parameters=parameters,
        tier=_tier(arch),
        cost_s=DRIFT_COST_S * steps / DRIFT_STEPS,
        unavailable=missing,
    )


def _task(request: PlanRequest, task: EvalTask, arch: str, missing: str | None) -> Check:
    items = task.full_items if request.is_full else task.smoke_items
    sizes = _sizes(request)
    passes = (
        2 * len(sizes) * -(-items // sum(sizes)) + 1
    )  # both arms, and the poisoned one on the first items
    parameters: tuple[tuple[str, Scalar], ...] = (
        ("kind", "task"), ("model", task.model), ("seed", request.seed), ("items", items),
        ("batches", ",".join(map(str, sizes))), ("engine", "in-process"), ("is_interleaved", True),
        ("stop", task.stop_token), ("scorer", task.scorer), ("tail_tokens", task.tail_tokens),
        ("min_score", task.min_score), ("poison_scale", 2.0), ("implementation", _implementation(arch)),
    )  # fmt: skip
    return Check(
        id=f"evals/{task.name}/{task.model}",
        stage=StageName.EVALS,
        proves=f"on {task.name} the optimised path answers no worse than stock, on the same items",
        cell=Cell.model_validate({"arch": arch, "batch": max(sizes), "context": 1024}),
        subject=task.name,
        thresholds=_thresholds(request),
        parameters=parameters,
        tier=_tier(arch),
        cost_s=PROMPT_COST_S * items * 2 + STEP_COST_S * task.answer_tokens * passes,
        unavailable=missing,
    )


def _official(request: PlanRequest, subject: str, arch: str) -> Iterator[Check]:
    """The official data on the claimed model, which only a server holds. AIME25 as lm-eval asks it, and
    repeated at a temperature."""
    missing = None if "vllm" in dict(request.machine.libraries) else NO_ENGINE
    sizes = _claimed_sizes(request.claim.envelope)
    each = MRCR_EACH_FULL if request.is_full else MRCR_EACH
    bands = _bands(request.claim.envelope)
    repeats = AIME_REPEATS_FULL if request.is_full else AIME_REPEATS
    for task in OFFICIAL[subject]:
        for word, count, temperature in (("greedy", 1, 0.0), ("repeated", repeats, AIME_TEMPERATURE)):
            if word == "repeated" and subject == "mrcr":
                continue
            is_mrcr = subject == "mrcr"
            items = each * len(bands) if is_mrcr else 30 * count
            asked: dict[str, Scalar] = {
                **_common(request, task, "official", request.pack.claimed_model, arch),
                "engine": "vllm", "repeats": count, "temperature": temperature, "items": items,
                "questions": each if is_mrcr else 0, "bands": ",".join(bands) if is_mrcr else "",
                "length_unit": "o200k_base" if is_mrcr else "none", "batches": ",".join(map(str, sizes)),
                "max_tokens": MAX_TOKENS[subject], "min_score": LEAST_SCORES[subject],
                "is_interleaved": False,
            }  # fmt: skip
            name = f"{task}.{word}" if task == "aime25" else task
            context = int(bands[-1].partition("-")[2]) if is_mrcr else MAX_TOKENS[subject]
            check = _answers_check(
                request, subject, f"{name}/{request.pack.claimed_model}", asked, context, missing
            )
            yield check.model_copy(update={"tier": Tier.CLAIM, "cost_s": 2.0 * items})


def _fixture(request: PlanRequest, subject: str, model: str, arch: str, missing: str | None) -> Check:
    """Generated rows in the data set's schema, answered by a small model in its own words."""
    place = int(request.is_full)
    items, tokens = FIXTURE_ITEMS[subject][place], FIXTURE_TOKENS[subject][place]
    asked: dict[str, Scalar] = {
        **_common(request, OFFICIAL[subject][0], "generated", model, arch),
        "engine": "in-process", "repeats": 1, "temperature": 0.0, "items": items, "questions": items,
        "bands": "", "length_unit": "model", "batches": ",".join(map(str, _sizes(request))),
        "max_tokens": tokens, "min_score": 0.95, "is_interleaved": True,
        "words": load_words(words_file(model)).digest(),
    }  # fmt: skip
    check = _answers_check(request, f"{subject}_fixture", f"{subject}_fixture/{model}", asked, 1024, missing)
    return check.model_copy(update={"tier": _tier(arch)})


def _local(request: PlanRequest, subject: str, arch: str, missing: str | None) -> Check:
    """Rows of a file, answered by the model that a CPU drives: it shows that the way from file to verdict
    works.
    """
    model = request.pack.smoke_model
    asked: dict[str, Scalar] = {
        **_common(request, OFFICIAL[subject][0], "local", model, arch),
        "engine": "in-process", "repeats": 2 if subject == "aime25" else 1,
        "temperature": AIME_TEMPERATURE if subject == "aime25" else 0.0, "items": None, "questions": 8,
        "bands": "", "length_unit": "model", "batches": "1,4", "max_tokens": 64, "min_score": 0.05,
        "is_interleaved": True,
    }  # fmt: skip
    check = _answers_check(request, f"{subject}_local", f"{subject}_local/{model}", asked, 1024, missing)
    return check.model_copy(update={"tier": _tier(arch)})


def _served(check: Check) -> Check:
    """The same asked of servers, one after another, whatever model they serve."""
    model = str(check.parameter("model"))
    asked = {
        **dict(check.parameters), "engine": "vllm", "model": "served", "batches": "1,4",
        "is_interleaved": False,
    }  # fmt: skip
    return check.model_copy(
        update={
            "id": check.id.replace("_local/", "_served/").replace(f"/{model}", "/server"),
            "parameters": tuple(sorted(asked.items())),
            "cost_s": SERVER_COST_S + check.cost_s,
            "unavailable": None,
        }
    )


def _common(request: PlanRequest, task: str, data: str, model: str, arch: str) -> dict[str, Scalar]:
    source = sources()[task]
    return {
        "kind": "official", "task": task, "data": data, "seed": request.seed,
        "dataset": source.dataset, "revision": source.revision, "files": source.digest(),
        "scorer": "aime" if task == "aime25" else "mrcr", "model": model,
        "poison_scale": 2.0, "implementation": _implementation(arch),
    }  # fmt: skip


def _answers_check(
    request: PlanRequest, subject: str, name: str, asked: dict[str, Scalar], context: int, missing: str | None
) -> Check:
    sizes = [int(size) for size in str(asked["batches"]).split(",")]
    cell = Cell.model_validate({"arch": request.machine.arch, "batch": max(sizes), "context": context})
    items, tokens = int(asked["items"] or 8), int(asked["max_tokens"] or 0)
    rounds = 2 * len(sizes) * -(-items // sum(sizes)) + 1
    return Check(
        id=f"evals/{name}",
        stage=StageName.EVALS,
        proves=f"on {asked['task']} ({asked['data']} data) the optimised path answers no worse than stock",
        cell=cell,
        subject=subject,
        thresholds=_thresholds(request),
        parameters=tuple(sorted(asked.items())),
        cost_s=PROMPT_COST_S * items * 2 + STEP_COST_S * tokens * rounds,
        unavailable=missing,
    )


def _feature(request: PlanRequest, name: str, arch: str, missing: str | None) -> Iterator[Check]:
    wordy = _wordy(request.pack.eval_tasks())
    model = request.pack.smoke_model if name == "structured_output" else next(iter(wordy), None)
    if model is None:
        missing, model = "the pack has no trained model with a word list", request.pack.smoke_model
    parameters: dict[str, Scalar] = {
        "kind": "feature", "model": model, "seed": request.seed, "items": FEATURE_ITEMS[name],
        "max_tokens": FEATURE_TOKENS[name], "temperature": 1.0 if name == "temperature_sampling" else 0.0,
        "poison_scale": 2.0, "implementation": _implementation(arch), "engine": "in-process",
        "kept_prefixes": 4 if name == "prefix_caching" else 0,
    }  # fmt: skip
    cell = Cell.model_validate({"arch": arch, "batch": FEATURE_ITEMS[name], "context": 1024})
    yield Check(
        id=f"evals/features/{name}/{model}",
        stage=StageName.EVALS,
        proves=FEATURES[name],  # type: ignore[index]  # a key of that mapping
        cell=cell,
        subject=name,
        thresholds=_thresholds(request),
        parameters=tuple(sorted(parameters.items())),
        tier=_tier(arch),
        cost_s=FEATURE_COST_S,
        unavailable=missing,
    )


def _engine(request: PlanRequest, arch: str) -> Check:
    """Both paths inside a real engine, measured by the pack's own program."""
    parameters: dict[str, Scalar] = {
        "kind": "engine", "engine": "vllm", "model": "served", "seed": request.seed,
        "implementation": _implementation(arch), "batches": ",".join(map(str, ENGINE_BATCHES)),
        "told": ",".join(map(str, ENGINE_TOLD)),
    }  # fmt: skip
    return Check(
        id=f"evals/{ENGINE}/inside",
        stage=StageName.EVALS,
        proves="inside a real engine every decode step takes the optimised path, and its log-probabilities "
        "part from stock's no further than stock's own backends do",
        cell=Cell.model_validate({"arch": arch, "batch": max(ENGINE_BATCHES), "context": 1024}),
        subject=ENGINE,
        thresholds=_thresholds(request),
        parameters=tuple(sorted(parameters.items())),
        tier=_tier(arch),
        cost_s=ENGINE_COST_S,
    )


def _bands(envelope: Envelope) -> tuple[str, ...]:
    """Bands whose questions fit the claim's longest context."""
    edges = pairwise(BANDS)
    fitting = tuple(f"{low}-{high}" for low, high in edges if high <= envelope.context.max)
    return fitting or (f"{BANDS[0]}-{BANDS[1]}",)


def _sizes(request: PlanRequest) -> tuple[int, ...]:
    """Batches of the embedded and generated questions: one that a CPU takes, or the claim's own."""
    return _claimed_sizes(request.claim.envelope) if request.is_full else (BATCH,)


def _claimed_sizes(envelope: Envelope) -> tuple[int, ...]:
    """Smallest, middle and largest bucket of the claim."""
    edges = envelope.batch_buckets
    return tuple(sorted({max(envelope.batch.min, edges[0]), edges[len(edges) // 2], edges[-1]}))


def _thresholds(request: PlanRequest) -> tuple[Threshold, ...]:
    proof = request.policy.proof(StageName.EVALS)
    values: dict[str, float | int | str | bool] = {
        **DEFAULTS,
        "alpha": request.policy.statistics.alpha,
        "power": request.policy.statistics.power,
        "min_path_share": request.policy.min_path_share,
        **(dict(proof.thresholds) if proof is not None else {}),
    }
    return tuple(Threshold(name=key, value=values[key]) for key in sorted(values))


def _implementation(arch: str) -> str:
    return "cpu" if arch == "cpu" else "cute"


def _tier(arch: str) -> Tier:
    return Tier.SMOKE if arch == "cpu" else Tier.RANK
