"""The expert kernel: packing, decoding and schedule replayed on the CPU; compilation; values on a GPU."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

from k3_decode.cute import expert_layout as layout
from k3_decode.cute import experts as op
from k3_decode.cute import mxfp4, router
from k3_decode.cute.variant import COMPILED, DISPATCHED
from k3_decode.ops.contract import Cell
from k3_decode.ops.experts import SPEC
from k3_decode.ops.mxfp4 import dequantise
from k3_decode.ops.router import SPEC as ROUTER
from k3_decode.shapes import CANARY, K3, NANO

from tests.k3_decode.op_errors import outputs, tensor

FORMS = [(3584, 384), (3584, 256), (96, 64), (64, 32)]


def decoded(words: np.ndarray) -> np.ndarray:
    """What `mxfp4.decode_word` does, on uint32: eight values a word."""
    keep, w = np.uint32(0x8E008E00), words.astype(np.uint32)
    folded = ((w << 7) & np.uint32(0x80808080)) | ((w >> 3) & np.uint32(0x7F7F7F7F))
    pairs = np.stack([w & keep, (w << 8) & keep, folded & keep, (folded << 8) & keep], axis=-1)
    halves = np.ascontiguousarray(pairs).view(np.uint16).view(np.float16)
    return halves.astype(np.float64) * 2.0**mxfp4.CODE_EXPONENT


def unpacked(stages: torch.Tensor, groups: int) -> torch.Tensor:
    """Values [tiles, 2, 8, K] of stages [tiles, slices, bytes], read lane by lane as the kernel does."""
    tiles, slices, _ = stages.shape
    words = stages[..., : groups * 256].contiguous().numpy().view(np.uint32)
    scales = stages[..., groups * 256 :].numpy().reshape(tiles, slices, 8, 2, mxfp4.scale_half(groups))
    values = np.zeros((tiles, 2, 8, slices, groups, 32))
    for lane in range(32):
        row, quarter = lane // 4, lane % 4
        for group in range(groups):
            for half in range(2):
                place = group // 2 * 128 + lane * 4 + group % 2 * 2 + half
                if group == groups - 1 and groups % 2:
                    place = groups // 2 * 128 + lane * 2 + half
                factor = 2.0 ** (scales[:, :, row, half, group].astype(np.float64) - 127)
                part = decoded(words[:, :, place]) * factor[..., None]
                values[:, half, row, :, group, 8 * quarter : 8 * quarter + 8] = part
    return torch.from_numpy(values).flatten(3)


def random_weights(experts: int, latent: int, inter: int) -> dict[str, torch.Tensor]:
    """Every code and scale bytes around one."""
    generator = torch.Generator().manual_seed(4)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    return {
        "w13": draw(0, 256, experts, 2 * inter, latent // 2),
        "w13_scale": draw(1, 255, experts, 2 * inter, latent // 32),
        "w2": draw(0, 256, experts, latent, inter // 2),
        "w2_scale": draw(1, 255, experts, latent, inter // 32),
    }


def test_a_reordered_word_decodes_to_all_sixteen_values_in_order() -> None:
    word = torch.tensor([0x76543210, -0x01234568], dtype=torch.int32)  # codes 0..7, then 8..15
    values = decoded(mxfp4.reorder_words(word).numpy())
    assert values[0].tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert values[1].tolist() == [-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


@pytest.mark.parametrize(("latent", "inter"), FORMS)
def test_prepared_weights_hold_every_value_where_its_lane_reads_it(latent: int, inter: int) -> None:
    weights, experts = random_weights(2, latent, inter), 2
    prepared, form = op.prepare(**weights), op.Form(latent, inter, experts, 4, 8)
    first = unpacked(prepared.w13.view(experts * form.tiles, form.slices, -1), form.slice_groups)
    gate_up = first.view(experts, form.tiles, 2, 8, latent).transpose(1, 2).reshape(experts, -1, latent)
    assert torch.equal(gate_up, dequantise(weights["w13"], weights["w13_scale"]))
    second = unpacked(prepared.w2.view(experts * latent // 16, form.chunks, -1), form.chunk_groups)
    assert torch.equal(second.reshape(experts, latent, inter), dequantise(weights["w2"], weights["w2_scale"]))


def test_prepare_refuses_a_scale_byte_that_means_nan() -> None:
    weights = random_weights(2, 64, 32)
    weights["w2_scale"][1, 5, 0] = 255
    with pytest.raises(ValueError, match="255"):
        op.prepare(**weights)


@pytest.mark.parametrize("units", [0, 5, 132, 384, 5712])
def test_block_ranges_cover_each_unit_once_and_differ_by_one_at_most(units: int) -> None:
    ranges = [layout.block_range(block, units, 132) for block in range(132)]
    covered = [first + i for first, count in ranges for i in range(count)]
    assert covered == list(range(units))
    assert max(count for _, count in ranges) - min(count for _, count in ranges) <= 1


@pytest.mark.parametrize("variant", op.variants(), ids=lambda v: v.name)
def test_every_variant_fits_one_multiprocessor(variant: Any) -> None:
    form = variant.compile.__defaults__[0]
    assert form.shared_bytes <= 227 * 1024
    assert form.owners <= 112
    assert form.area_bytes >= max(form.tile_bytes, 8 * form.slot_bytes)
    assert form.columns * form.k_warps * form.lanes == layout.WARPS
    assert form.slices * form.slice_groups * 32 == form.latent
    assert form.chunks * form.chunk_groups * 32 == form.inter


@pytest.mark.parametrize("architecture", DISPATCHED + COMPILED)
def test_compiles_and_reads_activations_only_after_the_wait(
    architecture: str, compile_smoke: Callable[[str, str], dict[str, str]]
) -> None:
    (ptx,) = compile_smoke("experts", architecture).values()
    before, after = ptx.split("griddepcontrol.wait", 1)
    assert f".target {architecture}" in before
    assert "ld.global" not in before
    assert "ld.global.v4" in after
    assert "ld.weak.global" not in ptx


@pytest.mark.parametrize("architecture", DISPATCHED[:1])
def test_up_to_eight_tokens_no_block_waits_for_a_counter(
    architecture: str, compile_smoke: Callable[[str, str], dict[str, str]]
) -> None:
    (ptx,) = compile_smoke("experts", architecture).values()
    assert "ld.acquire" not in ptx
    assert "red.release" not in ptx
    assert "st.relaxed.gpu.global.b32" in ptx
    assert "ld.relaxed.gpu.global.v4.b32" in ptx.split("griddepcontrol.wait", 1)[1]


def test_both_places_of_awaited_rows_lie_between_the_counters_and_the_other_rows() -> None:
    form = op.Form(3584, 384, 896, 16, 8, meets_by_value=True)
    assert form.round_bytes == 8 * 16 * 384 * 2
    assert form.hidden_offset == 128 + 2 * 98304
    assert op.workspace_bytes(inter=384, top_k=16, tokens=64) == form.hidden_offset + 64 * 16 * 384 * 2


def test_narrow_shards_that_select_meet_by_counters_and_all_other_few_tokens_by_values() -> None:
    forms = {(768, 1, True): True, (384, 1, True): True, (192, 1, True): False, (192, 1, False): True}
    forms |= {(192, 8, False): True, (768, 8, False): True, (768, 9, False): False}
    assert {key: op.meets_by_value(key[1], key[0], key[2]) for key in forms} == forms


@pytest.mark.gpu
@pytest.mark.parametrize("shapes", [K3.rank(8), CANARY.rank(1)], ids=lambda s: s.model.name)
def test_meeting_by_values_gives_the_bits_of_meeting_by_counters(
    shapes: Any, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = SPEC.make_args(Cell(shapes, 8), "gaussian", torch.Generator().manual_seed(6), gpu)
    names = ("w13", "w13_scale", "w2", "w2_scale")
    prepared = op.prepare(**{name: tensor(args[name]) for name in names})
    size = op.workspace_bytes(inter=shapes.expert_inter, top_k=shapes.model.top_k)
    space = torch.zeros(size, dtype=torch.uint8, device=gpu)
    launches = torch.zeros(16, dtype=torch.int32, device=gpu)
    for turn in range(30):
        rows, results = (8, 1, 3, 5)[turn % 4], list[Any]()
        given: dict[str, Any] = {
            name: tensor(args[name])[:rows].clone() for name in ("latent", "ids", "weights")
        }
        given["latent"] *= turn % 5
        for by_value in (range(0), range(1, 9)):
            monkeypatch.setattr(op, "BY_VALUE", by_value)
            out = torch.full_like(tensor(args["out"])[:rows], float("nan"))
            op.experts(**given, prepared=prepared, workspace=space, out=out, launches=launches)
            results.append(out.view(torch.int16).tolist())
        assert results[0] == results[1]


def test_selecting_two_tokens_is_refused_and_names_the_router() -> None:
    prepared = op.PreparedExperts(torch.empty(0), torch.empty(0), 96, 64, 16)
    ids, weights = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 4)
    rows = torch.zeros(2, 96, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="call the router first"):
        op.experts(
            latent=rows, ids=ids, weights=weights, prepared=prepared, workspace=rows, out=rows, launches=ids,
            logits=torch.zeros(2, 16), bias=torch.zeros(16),
        )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("shapes", [K3.rank(8), CANARY.rank(1), NANO.rank(2)], ids=lambda s: s.model.name)
@pytest.mark.parametrize("regime", ROUTER.regimes)
def test_a_launch_that_selects_gives_the_bits_of_router_and_experts(
    shapes: Any, regime: str, gpu: Any
) -> None:
    generator = torch.Generator().manual_seed(3)
    args = SPEC.make_args(Cell(shapes, 1), "gaussian", generator, gpu)
    names = ("w13", "w13_scale", "w2", "w2_scale")
    prepared = op.prepare(**{name: tensor(args[name]) for name in names})
    size = op.workspace_bytes(inter=shapes.expert_inter, top_k=shapes.model.top_k)
    space = torch.zeros(size, dtype=torch.uint8, device=gpu)
    launches = torch.zeros(16, dtype=torch.int32, device=gpu)
    rows = ROUTER.make_args(Cell(shapes, 1), regime, generator, gpu)
    selection = {name: rows[name] for name in ("logits", "bias", "scale")}
    results = []
    for selects in (False, True):
        ids, weights = torch.full_like(tensor(rows["ids"]), -7), torch.full_like(tensor(rows["weights"]), -7)
        out = torch.full_like(tensor(args["out"]), float("nan"))
        if not selects:
            router.router(**selection, ids=ids, weights=weights, launches=launches)
        op.experts(
            latent=tensor(args["latent"]), ids=ids, weights=weights, prepared=prepared,
            workspace=space, out=out, launches=launches, **(selection if selects else {}),
        )  # fmt: skip
        results.append(tuple(t.view(torch.uint8).tolist() for t in (ids, weights, out)))
    assert results[0] == results[1]
    assert launches.tolist() == [0] * 4 + [1, 2] + [0] * 10


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shapes", "tokens", "regime"),
    [
        (K3.rank(8), 1, "gaussian"),
        (K3.rank(8), 8, "heavy_tail"),
        (K3.rank(16), 17, "skipped_ids"),
        (K3.rank(8), 64, "one_expert_set"),
        (CANARY.rank(1), 64, "mixed_scales"),
        (NANO.rank(2), 3, "strided_rows"),
    ],
)
def test_matches_the_oracle_within_stocks_error_on_the_gpu(
    shapes: Any, tokens: int, regime: str, gpu: Any
) -> None:
    args = SPEC.make_args(Cell(shapes, tokens), regime, torch.Generator().manual_seed(2), gpu)
    truth = SPEC.oracle(args)
    names = ("w13", "w13_scale", "w2", "w2_scale")
    size = op.workspace_bytes(inter=shapes.expert_inter, top_k=shapes.model.top_k)
    space = torch.full((size,), 255, dtype=torch.uint8, device=gpu)
    space[: op.Form(shapes.model.latent, shapes.expert_inter, 1, shapes.model.top_k, 8).hidden_offset] = 0
    launches = torch.zeros(16, dtype=torch.int32, device=gpu)
    prepared = op.prepare(**{name: tensor(args[name]) for name in names})
    rest = {name: tensor(value) for name, value in args.items() if name not in names}
    op.experts(**rest, prepared=prepared, workspace=space, launches=launches)
    mine = outputs(SPEC, args, truth)["out"]
    SPEC.stock(**args)
    assert mine <= 2 * outputs(SPEC, args, truth)["out"] + 2 * 2.0**-8
    assert launches.tolist() == [0] * 5 + [1] + [0] * 10
    counts = space[:16].view(torch.int32).tolist()
    assert counts == [0, 0, 0, 1 if tokens <= 8 else 0]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1e-4, 1e-5, 1e-30])
def test_latents_below_the_scope_are_right_to_a_step_of_the_hidden_values(size: float, gpu: Any) -> None:
    shapes = CANARY.rank(1)
    args = SPEC.make_args(Cell(shapes, 5), "gaussian", torch.Generator().manual_seed(4), gpu)
    args["latent"] = tensor(args["latent"]) * size
    names = ("w13", "w13_scale", "w2", "w2_scale")
    space = torch.zeros(
        op.workspace_bytes(inter=shapes.expert_inter, top_k=shapes.model.top_k), dtype=torch.uint8, device=gpu
    )
    prepared = op.prepare(**{name: tensor(args[name]) for name in names})
    rest = {name: tensor(value) for name, value in args.items() if name not in names}
    op.experts(
        **rest, prepared=prepared, workspace=space, launches=torch.zeros(16, dtype=torch.int32, device=gpu)
    )
    truth = SPEC.oracle(args)["out"]
    second = dequantise(tensor(args["w2"]), tensor(args["w2_scale"])).abs().sum(2)
    shares = tensor(args["weights"]).double().unsqueeze(2)
    step = 2.0**-34 * (shares * second[tensor(args["ids"]).long()]).sum(1)
    error = (tensor(args["out"]).double() - truth).abs()
    assert (error <= step + 2.0**-8 * truth.abs()).all()
