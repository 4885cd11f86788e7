"""Single ops beside their peers: what the pack offers, what is built, and what the sweeps ask for."""

import ast
from pathlib import Path

import yaml
from k3_decode import pack
from k3_decode.pack import LAYER_KINDS, OP_KINDS, K3DecodePack

ROOT = Path(pack.__file__).parents[2]


def builders() -> list[str]:
    """Keys of `BUILDERS`, read without the GPU libraries that its module needs."""
    tree = ast.parse((ROOT / "kernels/k3_decode/peers/op_arms.py").read_text(encoding="utf-8"))
    tables = [node.value for node in tree.body if isinstance(node, ast.AnnAssign)]
    table = next(value for value in tables if isinstance(value, ast.Dict))
    return [key.value for key in table.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]


def swept(name: str) -> list[str]:
    """Kinds that a sweep definition asks for."""
    return list(yaml.safe_load((ROOT / "sweeps" / f"{name}.yaml").read_text(encoding="utf-8"))["kinds"])


def test_every_op_that_the_pack_offers_has_a_builder() -> None:
    assert [f"op.{name}" for name in builders()] == list(OP_KINDS)


def test_the_sweeps_of_single_ops_ask_for_each_of_them_once() -> None:
    assert sorted(swept("op") + swept("attend")) == sorted(OP_KINDS)


def test_layers_and_single_ops_are_timed_and_only_layers_are_traced() -> None:
    assert K3DecodePack().layer_kinds() == LAYER_KINDS
    assert K3DecodePack().timed_kinds() == (*LAYER_KINDS, *OP_KINDS)
