"""Settings of this process that can change a result, from an allow-list."""

import os
from collections.abc import Mapping, Sequence

from harness.domain.bundle import Environment

__all__ = ["ALLOWED_VARIABLES", "read_environment"]

ALLOWED_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES",
    "CUTE_DSL_ARCH",
    "CUTE_DSL_CACHE_DIR",
    "CUTE_DSL_KEEP_PTX",
    "CUTE_DSL_NO_CACHE",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_CUMEM_ENABLE",
    "NCCL_MNNVL_ENABLE",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "PYTHONHASHSEED",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_JIT",
    "TORCHDYNAMO_DISABLE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TRITON_INTERPRET",
    "VLLM_ALLREDUCE_USE_SYMM_MEM",
    "VLLM_ATTENTION_BACKEND",
    "VLLM_BATCH_INVARIANT",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16",
    "VLLM_USE_FLASHINFER_SAMPLER",
)
"""Variables whose values travel in a bundle. None of them can hold a credential."""
IMAGE_VARIABLE = "FASTTRACK_IMAGE_DIGEST"
"""Digest of the container image, set by whoever starts it: an image cannot hold its own."""


def read_environment(command: Sequence[str], variables: Mapping[str, str] | None = None) -> Environment:
    """Environment of this process (or of `variables`); redacted when the bundle is written."""
    values = os.environ if variables is None else variables
    return Environment(
        command=tuple(command),
        variables=tuple((name, values[name]) for name in ALLOWED_VARIABLES if name in values),
        image_digest=values.get(IMAGE_VARIABLE),
    )
