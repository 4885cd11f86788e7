"""An expert takes two rows a step; further rows go without it."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "tokens_over_capacity_dropped",
    op="experts",
    title="An expert takes two rows a step; further rows go without it.",
    report="EfficientMoE/MoE-Infinity#198",
    fault={
        "shares = torch.zeros(ids.shape[0], len(touched)).scatter_add_(1, place, weights)[:, skipped:]": "shares = torch.zeros(ids.shape[0], len(touched)).scatter_add_(1, place, weights)[:, skipped:]\n    shares = shares * ((shares != 0).cumsum(0) <= 2)",
    },
    repaired={
        "shares = torch.zeros(ids.shape[0], len(touched)).scatter_add_(1, place, weights)[:, skipped:]": "shares = torch.zeros(ids.shape[0], len(touched)).scatter_add_(1, place, weights)[:, skipped:]\n    shares = shares * ((shares != 0).cumsum(0) <= ids.shape[0])",
    },
)
