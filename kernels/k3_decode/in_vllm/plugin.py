"""Entry point `vllm.general_plugins`: `decode_backend: latency_specialized` selects the fused ops on SM90.

vLLM 0.33 refuses that value outside of SM100. With this plugin loaded the value is taken where vLLM's own
path cannot run and this one can; without the value nothing changes. vLLM is changed in memory, at the three
points of `points.POINTS` that are wrapped, and not on disk.

Settings beside the switch in `--additional-config`: `k3_decode_poison` (an op made wrong on purpose),
`k3_decode_ledger` (file that takes the decisions as JSON lines), `k3_decode_objects` (folder of kernels that
were compiled ahead).
"""

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from k3_decode.in_vllm.points import MODEL_MODULE, missing_points

__all__ = ["Settings", "register"]

SWITCH, ON = "decode_backend", "latency_specialized"
POISON_SCALE = 2.0
MAX_ROWS = 64
EXPERTS = "k3_decode_experts"
"""Attribute under which a layer's routed experts keep the layout that the ops take."""
_MARK = "_k3_decode_registered"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked for in `--additional-config`."""

    poison: str | None
    ledger: Path | None
    objects: Path | None


def register() -> None:
    """Wraps vLLM's points in this process; safe to call again. Leaves an unknown vLLM alone and says so."""
    import importlib

    if missing := missing_points():
        log.warning("k3_decode stays off: %s", "; ".join(missing))
        return
    model: Any = importlib.import_module(MODEL_MODULE)
    if getattr(model, _MARK, False):
        return
    setattr(model, _MARK, True)
    runtime = importlib.import_module("vllm.models.kimi_k3.nvidia.specialized_decode.runtime")
    quantization: Any = importlib.import_module("vllm.model_executor.layers.quantization.mxfp4")
    _wrap_config(model, runtime)
    _wrap_build(model)
    _wrap_loading(quantization.Mxfp4MoEMethod)


def _wrap_config(model: Any, runtime: Any) -> None:
    """`specialized_decode_config` gives our settings where vLLM's own path refuses the GPU and ours runs."""
    stock = model.specialized_decode_config

    def specialized_decode_config(vllm_config: Any) -> Any:
        extra = vllm_config.additional_config
        asked = extra.get(SWITCH, "auto") if isinstance(extra, dict) else "auto"
        if asked != ON or runtime.unsupported(vllm_config) is None:
            return stock(vllm_config)
        if (reason := _unsupported(vllm_config)) is not None:
            raise ValueError(f"neither vLLM's specialised decode nor k3_decode supports {reason}")
        _ACTIVE["config"] = vllm_config
        return _settings(extra)

    model.specialized_decode_config = specialized_decode_config


def _wrap_build(model: Any) -> None:
    """`build_specialized_decode` builds our decode where the settings are ours."""
    owner = model.KimiLinearForCausalLM
    stock = owner.build_specialized_decode

    def build_specialized_decode(self: Any) -> None:
        if not isinstance(self.specialized_decode_config, Settings):
            stock(self)
            return
        self.specialized_decode = _build(self.model, self.vllm_config, self.specialized_decode_config)
        self.needs_norm_in_logits = False

    owner.build_specialized_decode = build_specialized_decode


def _wrap_loading(owner: Any) -> None:
    """Routed experts are laid out for the ops before vLLM repacks them for its own kernels."""
    stock = owner.process_weights_after_loading

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        config = _ACTIVE.get("config")
        if config is not None and not hasattr(layer, EXPERTS):
            weights = {
                name: getattr(layer, f"{part}_weight{suffix}").data
                for part in ("w13", "w2")
                for name, suffix in ((part, ""), (f"{part}_scale", "_scale"))
            }
            setattr(layer, EXPERTS, _table(config)["experts"].prepare(**weights))
        stock(self, layer)

    owner.process_weights_after_loading = process_weights_after_loading


def _unsupported(vllm_config: Any) -> str | None:
    """Why the fused ops cannot decode this deployment; None where they can."""
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform

    from k3_decode.in_vllm.backbone import unsupported_model

    parallel, compilation = vllm_config.parallel_config, vllm_config.compilation_config
    cache = vllm_config.cache_config
    graphs = compilation.cudagraph_mode
    checks = (
        (not current_platform.is_device_capability(90), "this GPU (k3_decode dispatches on SM90)"),
        (parallel.tensor_parallel_size != 1, "tensor parallelism (k3_decode's collectives need their ranks)"),
        (parallel.pipeline_parallel_size != 1, "pipeline parallelism"),
        (parallel.enable_expert_parallel, "expert parallelism"),
        (parallel.decode_context_parallel_size != 1, "decode context parallelism"),
        (vllm_config.speculative_config is not None, "speculative decoding"),
        (vllm_config.lora_config is not None, "LoRA"),
        (not vllm_config.use_v2_model_runner, "the V1 model runner"),
        (
            graphs is None or graphs.decode_mode() != CUDAGraphMode.FULL,
            "deployments without FULL decode CUDA graphs (such as --enforce-eager)",
        ),
        (cache.cache_dtype not in ("auto", "bfloat16"), f"a KV cache of {cache.cache_dtype}"),
        (cache.use_replayssm or cache.use_kda_recoverssm, "ReplaySSM or RecoverSSM"),
        (vllm_config.attention_config.backend is None, "an attention backend that is not named"),
        (
            getattr(vllm_config.attention_config.backend, "name", "") != "FLASHMLA",
            "an MLA backend without pages of 64 (choose --attention-backend FLASHMLA)",
        ),
    )
    found = next((reason for failed, reason in checks if failed), None)
    return found or unsupported_model(vllm_config.model_config.hf_text_config)


def _settings(extra: dict[str, Any]) -> Settings:
    def path(name: str) -> Path | None:
        return Path(str(extra[name])) if extra.get(name) else None

    return Settings(extra.get("k3_decode_poison"), path("k3_decode_ledger"), path("k3_decode_objects"))


def _table(vllm_config: Any) -> Any:
    """The ops for this model on this process's device, one table for all layers."""
    import torch

    from k3_decode.in_vllm.backbone import rank_shapes
    from k3_decode.op_table import load_ops

    if "table" not in _ACTIVE:
        shapes = rank_shapes(vllm_config.model_config.hf_text_config, 1)
        device = torch.device("cuda", torch.cuda.current_device())
        _ACTIVE["table"] = load_ops("cute", shapes, device)
    return _ACTIVE["table"]


_ACTIVE: dict[str, Any] = {}
"""Of the one model that a process serves this way: vLLM's `config`, and the `table` of ops, whose workspaces
the layers share. Empty where the switch is off.
"""


def _build(backbone: Any, vllm_config: Any, settings: Settings) -> Any:
    """The decode over a loaded backbone."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    from k3_decode.decode import is_supported
    from k3_decode.dispatch import Site, load_guard
    from k3_decode.in_vllm.backbone import rank_shapes
    from k3_decode.in_vllm.decode import Decode, Deployment
    from k3_decode.op_table import poisoned

    shapes = rank_shapes(vllm_config.model_config.hf_text_config, 1)
    sizes = vllm_config.compilation_config.cudagraph_capture_sizes or ()
    most = min(MAX_ROWS, vllm_config.scheduler_config.max_num_seqs)
    table = _table(vllm_config)
    if settings.poison is not None:
        table = poisoned(table, settings.poison, POISON_SCALE)
    site = Site(
        arch="sm_90a", tp=1, dcp=1, kv_dtype="bf16", layers=shapes.model.layers,
        is_supported_model=is_supported(shapes.model),
    )  # fmt: skip
    deployment = Deployment(
        shapes=shapes,
        guard=load_guard(),
        site=site,
        batches=tuple(sorted(size for size in sizes if size <= most)),
        max_context=vllm_config.model_config.max_model_len,
        objects=settings.objects,
    )

    def context() -> Any:
        return get_forward_context() if is_forward_context_available() else None

    def write(words: str) -> None:
        log.info("k3_decode: %s", words)
        if settings.ledger is not None:
            with settings.ledger.open("a", encoding="utf-8") as file:
                file.write(words + "\n")

    def tell(decision: Any) -> None:
        write(json.dumps(asdict(decision)))

    def decline(rows: int, why: str) -> None:
        write(json.dumps({"rows": rows, "path": "stock", "reason": why}))

    experts = [
        getattr(layer.mlp.experts.routed_experts, EXPERTS) for layer in backbone.layers if layer.is_moe_layer
    ]
    built = Decode(backbone, deployment, table, experts, context, tell, decline)
    log.warning(
        "k3_decode: fused decode on SM90 for %s rows%s", deployment.batches,
        f", {settings.poison} POISONED" if settings.poison else "",
    )  # fmt: skip
    return built
