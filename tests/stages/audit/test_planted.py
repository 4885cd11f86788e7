"""Every planted kernel is caught, and every repaired twin is clean, in PTX and in every SASS."""

import pytest

from harness.stages.audit.planted import FOLDER, planted_facts, verdict

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
    assert len(ptx) == 42
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
        "load_before_wait, store_before_wait",
        "non_coherent_load",
        "prefetch_before_wait",
        "spill",
        "store_before_wait",
        "store_to_read_only",
        "unclassed",
    }


def test_planted_files_name_no_path_of_the_machine_they_were_made_on() -> None:
    assert all(
        "/" not in line.replace("//", "").replace("/*", "").replace("*/", "")
        for path in FOLDER.iterdir()
        for line in path.read_text().splitlines()
    )
