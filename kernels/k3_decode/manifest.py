"""Which kernels an optimised step must run, by kind of layer: what a trace of it is compared with.

Derived from the model's shape and from what each op launches for a number of rows, never from a run. On a GPU
a kernel is known by the name that its module gives it, on a CPU by its function; torch's one kernel a rank is
the gather of the embedding's rows. In one process ranks meet in `collectives/meetings.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from k3_decode.op_table import OpTable
from k3_decode.overlap import overlap_of
from k3_decode.shapes import K3Shapes

__all__ = [
    "AROUND",
    "LAYER_MARKS",
    "MARKS_PER_LAYER",
    "Use",
    "kinds_of_layers",
    "meetings_of_a_step",
    "pass_manifest",
    "uses_of",
]

CUTE_FUNCTIONS: Mapping[str, str] = {
    "attn_res": "_mix_rows",
    "projection": "_project",
    "kda_step": "_kda",
    "moe_front": "_project_all",
    "router": "_select",
    "experts": "_expert_chain",
    "situ_mlp": "_product",
    "latent_tail": "_norm_and_project",
    "mla_query": "_query",
    "mla_attend": "_attend",
    "mla_value": "_value",
}
"""Kernel function of each op's module under `cute/`."""
SELECTING_EXPERTS = "_select_and_chain"
"""Of `cute/experts.py`, where it does the router's work too."""
NARROW_MLP = "_mlp"
"""Of `cute/narrow_mlp.py`: one launch in place of `situ_mlp`'s two, under that op's counter."""
EMBEDDING = {
    False: ("aten::index_select",),
    True: ("*index_select*", "*indexSelect*", "*gather_kernel*", "*index_elementwise_kernel*"),
}
"""Torch's gather of the embedding's rows, by whether a GPU runs it; CUDA has a kernel for each shape."""
MEETING = {
    False: (("collectives/meetings.py:_combined",),),
    True: (("*copy_kernel*",), ("*CUDAFunctor_add*", "*AddFunctor*"), ("*CatArray*",)),
}
"""How ranks of one process meet, by whether a GPU runs it: torch's casts of the parts and of their sum, its
additions in rank order, and what puts the parts of a gather side by side."""
AROUND = ("aten::log_softmax", "*softmax*", "*SoftMax*", "*copy*", "*FillFunctor*")
"""The engine's own: the step's inputs, and log-probabilities of its logits."""
LAYER_MARKS = (
    "cpu/attn_res.py:attn_res",
    "ops/attn_res.py:stock",
    "kernel_cutlass__mix_rows_tensorptr*",
    "_attn_res_kernel",
)
"""What each layer begins with and runs again before its FFN; the last is vLLM's."""
MARKS_PER_LAYER = 2


@dataclass(frozen=True, slots=True)
class Use:
    """See `harness.domain.pack.KernelUse`."""

    op: str
    patterns: tuple[str, ...]
    layer: str
    count: int
    is_fused: bool = True


def kinds_of_layers(model: K3Shapes) -> dict[str, int]:
    """Layers by kind: `kda_dense`, `kda_moe`, `mla_moe`."""
    kinds: dict[str, int] = {}
    for layer in range(model.layers):
        kind = f"{'mla' if model.is_mla(layer) else 'kda'}_{'dense' if layer == 0 else 'moe'}"
        kinds[kind] = kinds.get(kind, 0) + 1
    return kinds


def uses_of(model: K3Shapes, table: OpTable, implementation: str, rows: int, tp: int) -> tuple[Use, ...]:
    """Every kernel of a whole step of `rows` rows on `tp` ranks of one process."""
    is_cute, inter = implementation == "cute", model.shared_inter // tp
    found = [
        use
        for kind in kinds_of_layers(model)
        for use in pass_manifest(table, implementation, rows, kind, inter)
    ]
    once = {"attn_res": 1, "projection": 1}
    found += _uses(table, implementation, rows, "step", once)
    found.append(Use("embedding", EMBEDDING[is_cute], "step", 1, is_fused=False))
    if tp > 1:
        found += _meetings(tp, is_cute=is_cute)
    if not is_cute:
        found.append(Use("stock", ("ops/*.py:stock",), "step", 0, is_fused=False))
    return tuple(found)


def pass_manifest(table: OpTable, implementation: str, rows: int, kind: str, inter: int) -> tuple[Use, ...]:
    """Kernels of one layer of a kind whose shared expert's shard is `inter` wide.

    On a GPU the shared expert runs on multiprocessors of its own, on a stream of its own, or along with the
    MoE front and a projection.
    """
    attention, _, ffn = kind.partition("_")
    is_cute = implementation == "cute"
    place = overlap_of(inter, rows).served("narrow_mlp" in table).shared if is_cute else "along"
    more: list[Use] = []
    calls = {"attn_res": MARKS_PER_LAYER, "projection": 2}
    if attention == "kda":
        calls["kda_step"] = 1
    else:
        calls |= {"mla_query": 1, "mla_attend": 1, "mla_value": 1}
    if ffn == "dense":
        calls["situ_mlp"] = 1
    else:
        calls |= {"moe_front": 1, "router": 1, "experts": 1, "latent_tail": 1}
        if place.startswith("narrow"):
            more.append(Use("situ_mlp", (_named(NARROW_MLP),), kind, 1))
        elif place == "aside":
            calls["situ_mlp"] = 1
        else:
            calls["projection"] += 1
    return (*_uses(table, implementation, rows, kind, calls), *more)


def meetings_of_a_step(model: K3Shapes) -> dict[str, int]:
    """Times that the ranks of a step meet, by what for: sums after each attention and FFN, and one more in a
    MoE; a gather at the head.
    """
    return {"sum": 2 * model.layers + (model.layers - 1), "gather": 1}


def _meetings(tp: int, *, is_cute: bool) -> Iterator[Use]:
    """Kernels of one sum and of one gather over the ranks of one process."""
    if not is_cute:
        for kind in ("sum", "gather"):
            yield Use("collective", MEETING[False][0], kind, 1, is_fused=False)
        return
    casts, additions, parts = MEETING[True]
    yield Use("collective", casts, "sum", tp + 1, is_fused=False)
    yield Use("collective", additions, "sum", tp - 1, is_fused=False)
    yield Use("collective", parts, "gather", 1, is_fused=False)


def _uses(table: OpTable, implementation: str, rows: int, layer: str, calls: Mapping[str, int]) -> list[Use]:
    is_selecting = rows < table["router"].from_rows
    return [
        Use(op, _patterns(op, implementation, is_selecting=is_selecting), layer, launches)
        for op, count in calls.items()
        if (launches := count * table[op].launches_of(rows))
    ]


def _patterns(op: str, implementation: str, *, is_selecting: bool) -> tuple[str, ...]:
    if implementation != "cute":
        return (f"{implementation}/{op}.py:{op}",)
    function = SELECTING_EXPERTS if op == "experts" and is_selecting else CUTE_FUNCTIONS[op]
    return (_named(function),)


def _named(function: str) -> str:
    """How a trace names a CuTe DSL kernel."""
    return f"kernel_cutlass_{function}_tensorptr*"
