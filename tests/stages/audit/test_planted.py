"""Every planted kernel is caught, and every repaired twin is clean, in PTX and in every SASS."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.stages.audit.cubin import parse_cubin
from harness.stages.audit.facts import Launch, Parameter, read_facts
from harness.stages.audit.foreign import disassembled
from harness.stages.audit.planted import FOLDER, planted_facts, verdict
from harness.stages.audit.planted_costs import planted_costs
from harness.stages.audit.ptx import parse_ptx
from harness.stages.audit.rules import access_findings
from harness.stages.audit.sass import parse_sass

HOIST = Path(__file__).parent / "data" / "compiler_hoist.py"
ROOT = Path(__file__).parents[3]
ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_planted_fault_is_caught_and_each_twin_is_clean(architecture: str) -> None:
    wrong = {
        p.name: (p.expect, said)
        for p in planted_facts(architecture)
        if not (found := verdict(p))[0]
        for said in found[1:]
    }
    assert wrong == {}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_case_has_a_fault_and_a_twin_at_both_levels(architecture: str) -> None:
    sass = {
        p.name.removesuffix(f".{architecture}")
        for p in planted_facts(architecture)
        if p.program.level == "sass"
    }
    ptx = {p.name for p in planted_facts(architecture) if p.program.level == "ptx"}
    assert len(ptx) == 48
    # A spill exists in machine code only; there 64-bit products are made of 32-bit ones, narrow or not.
    assert sass == (ptx | {"spill.fault", "spill.fixed"}) - {"narrow_offset.fault", "narrow_offset.fixed"}


def test_the_cases_cover_what_the_compiler_and_people_get_wrong() -> None:
    expected = {p.expect for p in planted_facts("sm_90a")}
    assert expected == {
        "clean",
        "mailbox_read_unguarded",
        "mailbox_read_unguarded, weak_flag_read",
        "multicast, weak_exchange",
        "narrow_offset",
        "weak_exchange",
        "load_before_wait",
        "load_before_wait, non_coherent_load",
        "load_before_wait, store_before_wait",
        "non_coherent_load",
        "prefetch_before_wait",
        "spill",
        "store_before_wait",
        "store_to_read_only",
        "unclassed",
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_cost_over_its_limit_is_caught_alone_and_each_at_its_limit_is_clean(architecture: str) -> None:
    rows = {name: said for name, _, _, said, _ in planted_costs(architecture)}
    faults = ("registers", "shared_memory", "spill", "cluster", "block_size", "multicast", "wide_loads")
    named = {rule: rule for rule in faults} | {"spill_beside_an_array": "spill"}
    assert rows == {f"costly_{name}.fault": rule for name, rule in named.items()} | {
        f"costly_{name}.fixed": "clean" for name in named
    }


def test_planted_files_name_no_path_of_the_machine_they_were_made_on() -> None:
    assert all(
        "/" not in line.replace("//", "").replace("/*", "").replace("*/", "")
        for path in FOLDER.iterdir()
        for line in path.read_text().splitlines()
    )


@pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="CuTe DSL (nvidia-cutlass-dsl) is not installed"
)
def test_a_load_that_the_compiler_moves_above_the_wait_is_found_in_machine_code_alone(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'kernels'}:{ROOT}"}
    command = [sys.executable, str(HOIST), str(tmp_path), *ARCHITECTURES]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for architecture in ARCHITECTURES:
        assert _rules(tmp_path, "fault", architecture) == (
            {"non_coherent_load"},
            {"non_coherent_load", "load_before_wait"},
        )
        assert _rules(tmp_path, "fixed", architecture) == (set(), set())


def _rules(folder: Path, kind: str, architecture: str) -> tuple[set[str], set[str]]:
    """Rules that the kernel breaks in PTX, and in machine code."""
    cubin = folder / f"{kind}.{architecture}.cubin"
    resources = {r.name: r for r in parse_cubin(cubin.read_bytes())}
    (ptx,) = parse_ptx(cubin.with_suffix(".ptx").read_text())
    (sass,) = parse_sass(disassembled(cubin), resources)
    roles = (Parameter("x", "activation"), Parameter("out", "output"))
    read = [read_facts(program, "k", roles, Launch(True), lambda _: "") for program in (ptx, sass)]
    first, second = ({f.rule for f in access_findings([fact], found)} for fact, found in read)
    return first, second
