"""Sizes of the K3 family, whole and per tensor-parallel rank.

Every other size in the package is derived from a `K3Shapes`; nothing restates one. Real figures: the K3
checkpoint as read by vLLM 0.33.0 and by independent open ports; totals 2.78 T parameters, 104.2 B activated.
"""

from dataclasses import dataclass, field, replace

__all__ = [
    "CANARY",
    "CANARY_H8",
    "K3",
    "KIMI_LINEAR_48B",
    "MXFP4_GROUP",
    "NANO",
    "NANO_H16",
    "NANO_LINEAR",
    "PRESETS",
    "K3Shapes",
    "RankShapes",
]

MXFP4_GROUP = 32
"""Consecutive K elements that share one E8M0 scale byte (OCP MX 1.0)."""


@dataclass(frozen=True, slots=True)
class K3Shapes:
    """A model of the K3 family. Every preset has K3's head sizes, so kernels need no special branch."""

    name: str
    hidden: int
    layers: int
    heads: int
    """Heads of KDA and of MLA."""
    experts: int
    top_k: int
    latent: int
    """Width of the routed experts' input and output; equals `hidden` where there is no latent MoE."""
    expert_inter: int
    shared_inter: int
    dense_inter: int
    """Width of the dense FFN of layer 0."""
    vocab: int
    q_lora: int | None
    """Rank of MLA's query; None: full rank (Kimi-Linear)."""
    attn_res_block: int | None
    """Layers per AttnRes block; None: plain residual stream (Kimi-Linear)."""
    head_dim: int = 128
    """KDA key and value width, also the decay's low rank."""
    conv_width: int = 4
    kv_lora: int = 512
    qk_nope: int = 128
    qk_rope: int = 64
    v_dim: int = 128
    has_latent_moe: bool = True
    has_full_rank_gate: bool = True
    has_mla_gate: bool = True
    is_situ: bool = True
    """SiTU-GLU (beta 4, linear beta 25); False: SiLU-GLU."""
    decay_lower_bound: float | None = -5.0
    """KDA log-decay: `bound sigmoid(exp(A_log) (g + dt_bias))`; None: `-exp(A_log) softplus(g + dt_bias)`."""
    routed_scale: float = 1.0
    norm_eps: float = 1e-5
    max_context: int = 1_048_576
    mla_layers: tuple[int, ...] = field(default=())
    """0-based layers that are MLA; empty: every 4th and the last."""

    def is_mla(self, layer: int) -> bool:
        """Whether 0-based `layer` attends with MLA rather than KDA."""
        if self.mla_layers:
            return layer in self.mla_layers
        return layer % 4 == 3 or layer == self.layers - 1

    @property
    def attn_res_blocks(self) -> int:
        """Finished AttnRes blocks after the last layer."""
        return -(-self.layers // self.attn_res_block) if self.attn_res_block else 0

    def rank(self, tp: int) -> "RankShapes":
        """One rank's shapes; raises `ValueError` when `tp` does not divide the heads."""
        return RankShapes(self, tp)


@dataclass(frozen=True, slots=True)
class RankShapes:
    """What one of `tp` ranks holds of a model: heads and FFN widths are divided, the rest is replicated."""

    model: K3Shapes
    tp: int

    def __post_init__(self) -> None:
        if self.tp < 1 or self.model.heads % self.tp:
            raise ValueError(
                f"tp {self.tp} does not divide the {self.model.heads} heads of {self.model.name}"
            )

    @property
    def heads(self) -> int:
        """Heads of this rank."""
        return self.model.heads // self.tp

    @property
    def channels(self) -> int:
        """heads x 128: width of q, of k, of v and of the gate."""
        return self.heads * self.model.head_dim

    @property
    def kda_in_rows(self) -> int:
        """Rows of the packed KDA input projection: q, k, v, g, f_a, beta, padded to a multiple of 16."""
        rows = 4 * self.channels + self.model.head_dim + self.heads
        return rows + -rows % 16

    @property
    def mla_in_rows(self) -> int:
        """Rows of the packed MLA input projection: q_a (or full-rank q), latent, k_pe, gate if any."""
        m = self.model
        query = m.q_lora or self.heads * (m.qk_nope + m.qk_rope)
        return query + m.kv_lora + m.qk_rope + (self.channels if m.has_mla_gate else 0)

    @property
    def expert_inter(self) -> int:
        """Width of one expert's shard, padded to whole groups; K3 at TP16: 192 to 256, as vLLM does."""
        width = self.model.expert_inter // self.tp
        if self.model.expert_inter >= 256 * 8:
            return max(width, 256)
        return width + -width % MXFP4_GROUP

    @property
    def expert_width(self) -> int:
        """Width of one expert's shard without padding, in whole groups."""
        width = self.model.expert_inter // self.tp
        return width + -width % MXFP4_GROUP

    @property
    def shared_inter(self) -> int:
        """Width of the shared expert's shard."""
        return self.model.shared_inter // self.tp

    @property
    def dense_inter(self) -> int:
        """Width of layer 0's dense FFN shard."""
        return self.model.dense_inter // self.tp


K3 = K3Shapes(
    name="k3",
    hidden=7168,
    layers=93,
    heads=96,
    experts=896,
    top_k=16,
    latent=3584,
    expert_inter=3072,
    shared_inter=6144,
    dense_inter=33792,
    vocab=163840,
    q_lora=1536,
    attn_res_block=12,
)
KIMI_LINEAR_48B = K3Shapes(
    name="kimi_linear_48b",
    hidden=2304,
    layers=27,
    heads=32,
    experts=256,
    top_k=8,
    latent=2304,
    expert_inter=1024,
    shared_inter=1024,
    dense_inter=9216,
    vocab=163840,
    q_lora=None,
    attn_res_block=None,
    has_latent_moe=False,
    has_full_rank_gate=False,
    has_mla_gate=False,
    is_situ=False,
    decay_lower_bound=None,
    routed_scale=2.446,
    mla_layers=(3, 7, 11, 15, 19, 23, 26),
)
CANARY = K3Shapes(
    name="canary",
    hidden=192,
    layers=6,
    heads=2,
    experts=16,
    top_k=4,
    latent=96,
    expert_inter=64,
    shared_inter=128,
    dense_inter=384,
    vocab=320,
    q_lora=128,
    attn_res_block=2,
    max_context=16384,
)
NANO = K3Shapes(
    name="nano",
    hidden=128,
    layers=6,
    heads=2,
    experts=8,
    top_k=2,
    latent=64,
    expert_inter=64,
    shared_inter=64,
    dense_inter=128,
    vocab=320,
    q_lora=64,
    attn_res_block=2,
    max_context=16384,
)
CANARY_H8 = replace(CANARY, name="canary_h8", heads=8)
NANO_H16 = replace(
    NANO, name="nano_h16", heads=16, expert_inter=512, shared_inter=512, dense_inter=512, vocab=512
)
"""Nano as 16 ranks can share it, each with as much as the kernels take at least."""
NANO_LINEAR = replace(
    NANO,
    name="nano_linear",
    latent=128,
    q_lora=None,
    attn_res_block=None,
    has_latent_moe=False,
    has_full_rank_gate=False,
    has_mla_gate=False,
    is_situ=False,
    decay_lower_bound=None,
    routed_scale=2.446,
)
"""Kimi-Linear's mechanisms at nano's size."""
PRESETS: dict[str, K3Shapes] = {
    s.name: s for s in (K3, KIMI_LINEAR_48B, CANARY, CANARY_H8, NANO, NANO_H16, NANO_LINEAR)
}
