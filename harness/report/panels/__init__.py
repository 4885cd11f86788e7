"""What each stage shows beside its checks: one module a stage, pure, from checks, outcomes and samples."""

from collections.abc import Callable, Sequence

from harness.domain.check import StageName
from harness.report.panels import audit, coverage, evals, isolation, kernels, sweep
from harness.report.panels.material import Material
from harness.report.view import Panel

__all__ = ["panels_of"]

_PANELS: dict[StageName, Callable[[Material], Sequence[Panel]]] = {
    StageName.ISOLATION: isolation.panels,
    StageName.AUDIT: audit.panels,
    StageName.KERNELS: kernels.panels,
    StageName.COVERAGE: coverage.panels,
    StageName.EVALS: evals.panels,
    StageName.SWEEP: sweep.panels,
}


def panels_of(stage: StageName, material: Material) -> tuple[Panel, ...]:
    """The stage's panels, without those that would be empty."""
    return tuple(
        p for p in _PANELS[stage](material) if p.svg or p.findings or (p.table is not None and p.table.rows)
    )
