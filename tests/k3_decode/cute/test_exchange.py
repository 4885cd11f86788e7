"""The exchange kernels: their source on overlapping threads; what words become; compilation."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

import torch
from k3_decode.cute import exchange as op
from k3_decode.cute.variant import DISPATCHED
from k3_decode.ops.exchange import rank_ordered_sum
from k3_decode.ops.mailbox import SENTINEL, MailboxLayout

from tests.k3_decode.cute.concurrent import Device, canonical, canonical_fp32

THREADS = 3
"""Of a block in these tests; a kernel's own number would only add threads."""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "THREADS", THREADS)


def _parts(ranks: int, rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn((ranks, rows, columns), generator=generator).to(torch.bfloat16)
    parts[:, :, ::5] = -0.0
    parts[0, 0, 1], parts[-1, 0, 2] = torch.inf, torch.nan
    return parts


def _launch(device: Device, parts: torch.Tensor, form: str, blocks: int, **how: Any) -> torch.Tensor:
    """One exchange; threads have one vector each where the form allows it and there are enough of them."""
    ranks, rows, columns = parts.shape
    width = columns // 8
    is_single = form == "one_shot" and blocks * THREADS >= rows * width
    out = torch.full((ranks, rows, columns // ranks if form == "scatter" else columns), -3.0).to(
        torch.bfloat16
    )
    part, result = device.memory.place(parts), device.memory.place(out)
    tensors = (part, device.mailboxes[0], device.reach, device.control, result, device.launches)
    constants = (ranks, width, device.layout.part_bytes, form, 0, is_single)
    device.run(op, "_exchange_rows", tensors, constants, blocks, **how)
    return device.memory.read(result)


def _wanted(parts: torch.Tensor, form: str) -> torch.Tensor:
    total, ranks = rank_ordered_sum(parts), len(parts)
    if form == "scatter":
        return total.view(len(total), ranks, -1).transpose(0, 1)
    return total.expand(ranks, -1, -1)


def _same(out: torch.Tensor, want: torch.Tensor) -> bool:
    bits = out.contiguous().view(torch.int16) == want.contiguous().view(torch.int16)
    return bool((bits | (out.isnan() & want.isnan())).all())


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # inf - inf, as on the device
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_rank_gets_the_rank_ordered_sum_in_shapes_and_forms_that_alternate(ranks: int) -> None:
    columns = 8 * ranks
    device = Device(ranks, 3 * columns * 2)
    runs = [
        (2, "one_shot"),
        (3, "two_stage"),
        (1, "scatter"),
        (1, "two_stage"),
        (2, "scatter"),
        (1, "one_shot"),
    ]
    for epoch, (rows, form) in enumerate(runs):
        parts = _parts(ranks, rows, columns, epoch)
        assert _same(_launch(device, parts, form, 1 + epoch % 2), _wanted(parts, form)), (epoch, rows, form)
    control = device.memory.read(device.control)
    assert control.tolist() == [[6, 0, 0, 0, 0, 0, 0, 0]] * ranks
    assert all((device.memory.read(box) == SENTINEL - (1 << 32)).all() for box in device.mailboxes)
    assert device.memory.read(device.launches).tolist() == [0] * 14 + [6, 0]


def test_a_rank_that_stays_away_is_named_and_the_result_is_nan() -> None:
    device = Device(2, 64)
    parts = _parts(2, 1, 16, 0)
    _launch(device, parts, "one_shot", 1)
    out = _launch(device, parts, "one_shot", 1, limit=5, absent=(1,))
    assert out[0].isnan().all()
    control = device.memory.read(device.control)[0].tolist()
    assert control[:5] == [2, 0, 1, 1, 1]  # two epochs; fault: one_shot, in epoch 1, nothing from rank 1
    assert control[5] in (0, 1)


def test_a_rank_that_counts_another_epoch_is_noticed() -> None:
    """The control: without it the epochs that agree would prove nothing."""
    device = Device(2, 64)
    device.memory.store(device.control.base, (1,))
    out = _launch(device, _parts(2, 1, 16, 0), "one_shot", 1, limit=20)
    assert out.isnan().all()


@pytest.mark.parametrize(
    ("word", "sent"),
    [
        (0x80008000, 0x00000000), (0x80003F80, 0x00003F80), (0x3F808000, 0x3F800000),
        (0x00008001, 0x00008001), (0x80010000, 0x80010000), (0xFFC07FC1, 0xFFC07FC1),
        (0xFF807F80, 0xFF807F80), (0xBF80BF80, 0xBF80BF80),
    ],
)  # fmt: skip
def test_negative_zeros_lose_their_sign_and_everything_else_passes(word: int, sent: int) -> None:
    assert canonical(word) == sent


def test_no_bf16_pair_is_sent_as_the_sentinel() -> None:
    halves = (0x0000, 0x8000, 0x8001, 0x7FFF, 0xFFFF, 0x3F80)
    assert SENTINEL not in {canonical(high << 16 | low) for high in halves for low in halves}


@pytest.mark.parametrize(
    ("word", "sent"), [(0x80008000, 0x80000000), (0x80000000, 0x80000000), (0x7FC00001, 0x7FC00001)]
)
def test_one_fp32_denormal_is_sent_as_negative_zero(word: int, sent: int) -> None:
    assert canonical_fp32(word) == sent


@pytest.mark.parametrize("architecture", DISPATCHED)
def test_compiles_to_strong_accesses_of_mailboxes(
    architecture: str, compile_smoke: Callable[[str, str], dict[str, str]]
) -> None:
    (ptx,) = compile_smoke("exchange", architecture).values()
    before, after = ptx.split("griddepcontrol.wait", 1)
    assert f".target {architecture}" in before
    assert "ld.global" not in before
    assert after.count("st.relaxed.sys.global.v4.b32") == 8 + 8  # to 8 mailboxes, and 8 slots re-armed
    assert after.count("ld.relaxed.sys.global.v4.b32") == 8
    assert "multimem" not in ptx


def test_what_does_not_fit_is_refused() -> None:
    part = torch.zeros((2, 3, 16), dtype=torch.bfloat16)
    nothing = torch.zeros(1)
    with pytest.raises(ValueError, match="3 rows of 16 columns need 96 bytes of 64"):
        op.exchange(
            part=part, mailbox=nothing, reach=nothing, control=nothing, out=part, launches=nothing,
            layout=MailboxLayout(2, 64), first_rank=0, limit=1,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("vectors", "local", "blocks"), [(1, 1, 1), (896, 1, 7), (57344, 1, 448), (57344, 16, 33)]
)
def test_blocks_never_outnumber_what_the_device_holds_at_once(
    vectors: int, local: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "THREADS", 128)
    assert op.blocks_of(vectors, local) == blocks
