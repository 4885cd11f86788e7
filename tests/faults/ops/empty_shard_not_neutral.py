"""A shard without keys takes part in the merge."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "empty_shard_not_neutral",
    op="mla_value",
    title="A shard without keys takes part in the merge.",
    report="sgl-project/sglang#34240",
    fault={
        "has_keys = torch.isfinite(partial_lse)": "has_keys = torch.ones_like(partial_lse, dtype=torch.bool)",
    },
    repaired={
        "has_keys = torch.isfinite(partial_lse)": "has_keys = partial_lse.abs() < torch.inf",
    },
)
