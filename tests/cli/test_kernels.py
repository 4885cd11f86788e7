"""`fasttrack kernels` speaks JSON, says what it does not know, and answers with the contract's exit codes."""

import json

import pytest

from harness.cli.main import _exit_code


def test_kernels_list_prints_one_document_with_every_op(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(["kernels", "list", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["pack"] == "k3_decode"
    assert [op["op"] for op in document["ops"]][:3] == ["attn_res", "projection", "kda_step"]


def test_an_unknown_op_is_bad_input_and_the_known_ones_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(["kernels", "test", "no_such_op"]) == 2
    assert "no op is called no_such_op; the pack has attn_res" in capsys.readouterr().err


def test_a_cell_that_does_not_exist_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(["kernels", "bench", "router", "--cell", "b999"]) == 2
    assert "no cell that runs here matches b999" in capsys.readouterr().err


def test_testing_one_op_in_one_cell_exits_with_0_and_prints_its_outcome(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        _exit_code(["kernels", "test", "router", "--cell", "router/nano/cpu.tp1.dcp1.b1.c65", "--json"]) == 0
    )
    (outcome,) = json.loads(capsys.readouterr().out)["outcomes"]
    assert outcome["status"] == "PASS"
    assert outcome["control"]["failed"] is True
