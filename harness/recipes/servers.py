"""A recipe as the settings file that `evals run` and `sweep run` take with `--engine vllm --server`.

Pure. What both arms share stands once, and the acceptance travels with its label and its golden length.
"""

from collections.abc import Sequence

from harness.domain.errors import InputError
from harness.engines.served import Acceptance, ServedArm, ServerSettings
from harness.recipes.commands import Recipe, Workload
from harness.recipes.table import ModelRecipe

__all__ = ["server_settings"]

OURS = ("--host=", "--port=")
"""Chosen when a server is started."""


def server_settings(models: Sequence[ModelRecipe], found: Recipe, workload: Workload) -> ServerSettings:
    """Settings of both servers; raises `InputError` where the machine has no optimised arm."""
    if not found.optimised:
        raise InputError(f"{found.model} on {found.gpus} has no optimised arm: {found.notes[0]}")
    model = next(m for m in models if m.model == found.model)
    common = tuple(word for word in found.stock[3:] if not word.startswith(OURS))
    return ServerSettings(
        model=model.weights,
        served_name=model.weights,
        common=common,
        optimised=ServedArm(arguments=tuple(word for word in found.optimised if word not in found.stock)),
        acceptance=_acceptance(model, workload),
        start_limit_s=3600,
        answer_limit_s=7200,
    )


def _acceptance(model: ModelRecipe, workload: Workload) -> Acceptance | None:
    if not workload.drafts or model.drafter is None:
        return None
    is_forced = workload.synthetic_acceptance is not None
    golden = None if is_forced else model.drafter.golden_acceptance[workload.drafts - 1]
    return Acceptance(label="synthetic" if is_forced else "measured", drafts=workload.drafts, golden=golden)
