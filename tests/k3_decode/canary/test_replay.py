"""Replay and faults: held to the training forward, to the stock path, and to what each fault says it does."""

import pytest
import torch
from k3_decode.canary import replay
from k3_decode.canary.export import load_network, read_safetensors
from k3_decode.canary.faults import FAULTS, Fault
from k3_decode.canary.kda import naive
from k3_decode.canary.network import Network, forward, pieces
from k3_decode.canary.replay import Caches, Model, Path, advance, load_model
from k3_decode.canary.sensitivity import measure, prepare
from k3_decode.canary.tasks import Sample, chain_samples, mrcr_samples
from k3_decode.pack import K3DecodePack
from k3_decode.session import CANARY_FILE
from k3_decode.shapes import CANARY

from harness.domain.pack import SessionRequest

TOKENS = torch.tensor([mrcr_samples(seed=21, count=1, tokens=256)[0].prompt[:40]])
NONE = {
    "stale_state": 0,
    "decay_bf16": 24,
    "state_bf16": 24,
    "kv_scale": 1.0,
    "short_accumulator": 24,
    "conv_seam": -1,
}
"""Size that is no fault, where it is not 0."""


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(read_safetensors(CANARY_FILE), CANARY)


@pytest.fixture(scope="module")
def chains() -> tuple[Sample, ...]:
    return chain_samples(seed=22, count=2, generated=33)


def test_without_rounding_a_replay_is_the_training_forward(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "rounded", lambda x: x)
    network = Network(CANARY)
    load_network(network, CANARY_FILE)
    with torch.no_grad():
        wanted, _ = forward(network, TOKENS, torch.arange(40), pieces(CANARY, naive, is_compiled=False))
    found = advance(model, Caches(), TOKENS, Path())[0]
    assert (found - wanted).abs().max() < 0.05


def test_cutting_a_replay_into_pieces_changes_nothing(model: Model) -> None:
    caches = Caches()
    parts = [advance(model, caches, part, Path()) for part in torch.split(TOKENS, [17, 1, 22], 1)]
    assert (torch.cat(parts, 1) - advance(model, Caches(), TOKENS, Path())).abs().max() < 0.02


def test_a_replay_gives_the_stock_paths_log_probabilities() -> None:
    sample = mrcr_samples(seed=21, count=1, tokens=256)[0]
    request = SessionRequest(model="canary", arm="stock", max_requests=1, max_context=300)
    session = K3DecodePack().open_session(request, None)
    ids, first = session.prefill([sample.prompt])
    found = [first, *(session.decode(ids, [token]) for token in sample.answer[:6])]
    session.close()
    model = load_model(read_safetensors(CANARY_FILE), CANARY)
    whole = torch.tensor([[*sample.prompt, *sample.answer[:6]]])
    logits = advance(model, Caches(), whole, Path())[0, len(sample.prompt) - 1 :]
    wanted = torch.log_softmax(logits, -1)
    likely = wanted > -12
    assert (torch.cat(found).float() - wanted)[likely].abs().max() < 0.1


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_of_no_size_is_no_fault(model: Model, chains: tuple[Sample, ...], fault: Fault) -> None:
    prepared = prepare(model, chains)
    measure(model, prepared, Path(), "chains", "stock")
    if fault.name == "conv_seam":
        pytest.skip("its smallest size is one channel")
    path = fault.planted(NONE.get(fault.name, 0.0))
    assert max(measure(model, prepared, path, "chains", fault.name).peak) < 1e-3


@pytest.mark.parametrize(
    "fault", [f for f in FAULTS if f.name not in ("kv_scale", "softmax_scale")], ids=lambda fault: fault.name
)
def test_a_gross_fault_moves_log_probabilities(
    model: Model, chains: tuple[Sample, ...], fault: Fault
) -> None:
    prepared = prepare(model, chains)
    measure(model, prepared, Path(), "chains", "stock")
    moved = measure(model, prepared, fault.planted(fault.sizes[0]), "chains", fault.name)
    assert max(moved.drift) > 1e-4


def test_the_ignored_scale_reaches_rows_past_4096_alone() -> None:
    fault = next(f for f in FAULTS if f.name == "kv_scale")
    rows = torch.ones(1, 4100, 576)
    read = fault.planted(2.0).stored_rows(rows)
    assert read[0, 4095, 0] == 1.0
    assert read[0, 4096, 0] == 0.5


def test_a_wrong_expert_is_taken_only_where_scores_are_close() -> None:
    fault = next(f for f in FAULTS if f.name == "wrong_expert")
    scores = torch.tensor([[0.9, 0.5, 0.499, 0.1], [0.9, 0.5, 0.4, 0.1]])
    ranked = torch.sort(scores, dim=-1, descending=True).indices
    assert fault.planted(0.01).selection(scores, ranked, 2, 1).tolist() == [[0, 2], [0, 1]]


def test_base_two_of_one_shard_moves_weight_between_shards() -> None:
    fault = next(f for f in FAULTS if f.name == "lse_base")
    scores = torch.log(torch.tensor([[[[1.0, 8.0, 1.0, 1.0]]]]))
    changed = fault.planted(1.0).scores(
        scores,
        torch.tensor([3]),
    )
    # shard 1 holds 8 = e^2.0794; read in base 2 as base e it weighs e^(2.0794 x 1.4427) = e^3 = 20.09
    assert changed.exp()[0, 0, 0].tolist() == pytest.approx([1.0, 20.0855, 1.0, 1.0], rel=1e-4)


def test_a_short_accumulator_loses_terms_below_half_of_its_last_bit() -> None:
    fault = next(f for f in FAULTS if f.name == "short_accumulator")
    share = torch.full((1, 1, 1, 192), 1 / 192)
    latent = torch.cat([torch.ones(1, 128, 1), torch.full((1, 64, 1), 1 / 16)], 1)
    # eight steps of 16 x 1, then four of 16 x 1/16 = 1, over weights of 192; four bits at 128 end at 16
    assert fault.planted(4).weighted(share, latent).item() == pytest.approx(128 / 192)
    assert fault.planted(8).weighted(share, latent).item() == pytest.approx(132 / 192)


def test_an_fp8_cache_gives_back_what_e4m3_and_the_packs_scale_hold(model: Model) -> None:
    exact, held = Caches(), Caches(kv_dtype="fp8")
    for caches in (exact, held):
        advance(model, caches, TOKENS, Path())
    units = held.rows[3] / 0.0173
    torch.testing.assert_close(units.to(torch.float8_e4m3fn).float(), units)
    assert not torch.equal(held.rows[3], exact.rows[3])
    assert held.copy().kv_dtype == "fp8"


def test_rounding_the_attention_weights_is_the_default_and_fp32_a_right_choice() -> None:
    share = torch.tensor([[[[1.0, 1 / 3]]]]) * 0.75
    latent = torch.tensor([[[0.0], [1.0]]])
    third = float(torch.tensor(1 / 3).bfloat16())
    assert Path().weighted(share, latent).item() == pytest.approx(0.75 * third)
    assert Path(0.0, replay.BENIGN["fp32 attention weights"]).weighted(share, latent).item() == 0.25
