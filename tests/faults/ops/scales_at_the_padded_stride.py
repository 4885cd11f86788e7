"""Scales are read at the padded row stride, though they were written without padding."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "scales_at_the_padded_stride",
    op="experts",
    title="Scales are read at the padded row stride, though they were written without padding.",
    report="ROCm/aiter#2900",
    fault={
        "_scale_table()[scales.long()]": "_scale_table()[\n        torch.nn.functional.pad(scales, (0, -scales.shape[-1] % 8), value=127).flatten()[: scales.numel()].view(scales.shape).long()\n    ]",
    },
    repaired={
        "_scale_table()[scales.long()]": "_scale_table()[\n        torch.nn.functional.pad(scales, (0, -scales.shape[-1] % 8), value=127)[..., : scales.shape[-1]].long()\n    ]",
    },
    function="unpack",
)
