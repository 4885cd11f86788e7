"""Command lines of one cell: both servers, the load generator, the evals.

Pure. Every command is a tuple of arguments; `shell` joins them so that they can be pasted.
"""

import shlex
from collections.abc import Sequence

from pydantic import Field

from harness.domain.errors import InputError
from harness.domain.record import Positive, Record, Whole
from harness.recipes.table import MachineRecipe, ModelRecipe

__all__ = ["Recipe", "Workload", "recipe", "shell"]

PORT = 8000
STEPS_A_REQUEST = 10
"""Prompts a concurrent user: enough that most of a run is at the asked batch."""


class Workload(Record):
    """What is served: the cell of a claim, as a load generator sees it."""

    batch: Positive = 1
    input_tokens: Positive = 1
    output_tokens: Positive = 1000
    drafts: Whole = 0
    synthetic_acceptance: float | None = Field(default=None, gt=0)
    """Acceptance length that is forced instead of measured; such a figure is labelled so."""


class Recipe(Record):
    """The commands, and what has to be said beside them."""

    model: str
    gpus: str
    stock: tuple[str, ...]
    """Empty where the machine cannot hold the model."""
    optimised: tuple[str, ...]
    """Empty where there is no optimised path; `notes` says why."""
    bench: tuple[str, ...]
    evals: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    sources: tuple[str, ...]


def recipe(models: Sequence[ModelRecipe], model: str, gpus: str, workload: Workload) -> Recipe:
    """The commands of a cell; raises `InputError` for a model, machine or workload outside the table."""
    found = next((m for m in models if m.model == model), None)
    if found is None:
        raise InputError(f"no recipe for model {model!r}; known: {', '.join(m.model for m in models)}")
    machine = next((m for m in found.machines if m.gpus.lower() == gpus.lower()), None)
    if machine is None:
        known = ", ".join(m.gpus for m in found.machines)
        raise InputError(f"no recipe for {model} on {gpus!r}; known: {known}")
    _require_fits(found, workload)
    serves = not machine.is_impossible
    stock = _server(found, machine, workload) if serves else ()
    return Recipe(
        model=found.model,
        gpus=machine.gpus,
        stock=stock,
        optimised=(*stock, found.switch) if machine.is_specialised else (),
        bench=_bench(found, workload) if serves else (),
        evals=_evals(found, workload) if serves else (),
        notes=_notes(found, machine, workload),
        sources=_sources(found, machine, workload),
    )


def shell(command: Sequence[str]) -> str:
    """One command as a line to paste."""
    return shlex.join(command)


def _require_fits(model: ModelRecipe, workload: Workload) -> None:
    if workload.batch > model.max_batch:
        raise InputError(
            f"batch {workload.batch} is beyond what {model.model}'s optimised path takes ({model.max_batch})"
        )
    if not workload.drafts:
        if workload.synthetic_acceptance is not None:
            raise InputError("a synthetic acceptance needs --drafts")
        return
    if model.drafter is None or workload.drafts > model.drafter.max_drafts:
        most = model.drafter.max_drafts if model.drafter else 0
        raise InputError(f"{workload.drafts} drafts: {model.model}'s optimised path takes at most {most}")
    if (
        workload.synthetic_acceptance is not None
        and not 1 <= workload.synthetic_acceptance <= workload.drafts + 1
    ):
        raise InputError(
            f"an acceptance of {workload.synthetic_acceptance:g} tokens a step is impossible with "
            f"{workload.drafts} drafts; it lies between 1 and {workload.drafts + 1}"
        )


def _server(model: ModelRecipe, machine: MachineRecipe, workload: Workload) -> tuple[str, ...]:
    speculative: tuple[str, ...] = ()
    if workload.drafts and model.drafter is not None:
        config = model.drafter.config.replace("DRAFTS", str(workload.drafts))
        if workload.synthetic_acceptance is not None:
            config = config.replace(
                '"rejection_sample_method": "block"',
                '"rejection_sample_method": "synthetic", '
                f'"synthetic_acceptance_length": {workload.synthetic_acceptance:g}',
            )
        speculative = (f"--speculative-config={config}",)
    return (
        "vllm",
        "serve",
        model.weights,
        "--host=127.0.0.1",
        f"--port={PORT}",
        *model.common,
        *machine.arguments,
        *speculative,
    )


def _bench(model: ModelRecipe, workload: Workload) -> tuple[str, ...]:
    return (
        "vllm",
        "bench",
        "serve",
        f"--model={model.weights}",
        f"--base-url=http://127.0.0.1:{PORT}",
        "--dataset-name=random",
        f"--random-input-len={workload.input_tokens}",
        f"--random-output-len={workload.output_tokens}",
        "--ignore-eos",
        f"--num-prompts={workload.batch * STEPS_A_REQUEST}",
        f"--max-concurrency={workload.batch}",
        f"--num-warmups={workload.batch}",
        "--percentile-metrics=ttft,tpot,itl",
        "--metric-percentiles=50,90,99",
        "--save-result",
    )


def _evals(model: ModelRecipe, workload: Workload) -> tuple[tuple[str, ...], ...]:
    endpoint = (
        f"--model_args=base_url=http://127.0.0.1:{PORT}/v1/chat/completions,model={model.weights},"
        f"num_concurrent={workload.batch}"
    )
    return tuple(
        ("lm_eval", "--model=local-chat-completions", endpoint, f"--tasks={task}", *extra, "--log_samples")
        for task, extra in (
            ("aime25", ("--apply_chat_template",)),
            (
                "mrcr_2needle,mrcr_4needle,mrcr_8needle",
                ("--include_path=evals/mrcr", "--apply_chat_template"),
            ),
        )
    )


def _notes(model: ModelRecipe, machine: MachineRecipe, workload: Workload) -> tuple[str, ...]:
    notes = [machine.why_not] if machine.why_not else []
    if machine.is_impossible:
        return tuple(notes)
    notes.append(
        "run the two servers in turn on the same GPUs, each with a cold prefix cache; evals at the batch of "
        "the claim (num_concurrent), or they grade a path that nobody claimed"
    )
    notes.append(
        "decode throughput is concurrency / mean TPOT, prefill excluded; give verify steps a second first"
    )
    if workload.drafts and model.drafter is not None:
        if workload.synthetic_acceptance is not None:
            notes.append(
                f"acceptance {workload.synthetic_acceptance:g} is synthetic: compare it with synthetic "
                "figures of the same length only"
            )
        else:
            golden = model.drafter.golden_acceptance[workload.drafts - 1]
            notes.append(
                f"acceptance is measured (spec_decode counters of /metrics); golden for {workload.drafts} "
                f"drafts: {golden:g} tokens a step"
            )
    return tuple(notes)


def _sources(model: ModelRecipe, machine: MachineRecipe, workload: Workload) -> tuple[str, ...]:
    drafter = model.drafter if workload.drafts else None
    return (
        f"weights: {model.weights_source}",
        f"machine: {machine.source}",
        f"switch: {model.switch_source}",
        *((f"drafts: {drafter.source}", f"golden acceptance: {drafter.golden_source}") if drafter else ()),
    )
