"""A latent beyond fp8's range is not brought to the largest value before the cast."""

from tests.faults.planting import FP8, op_fault

FAULT = op_fault(
    "cache_overflow_not_saturated",
    op="mla_query",
    title="A latent beyond fp8's range becomes NaN in the cache instead of the largest value.",
    report="jax-ml/ml_dtypes#400",
    fault={
        ".clamp_(-FP8_MAX, FP8_MAX)": ".where(stored.float().abs() <= FP8_MAX * kv_scale, torch.nan)",
    },
    repaired={
        ".clamp_(-FP8_MAX, FP8_MAX)": ".clamp(min=-FP8_MAX, max=FP8_MAX)",
    },
    cells=(FP8,),
)
