"""Which paths a bundle may hold, and where samples lie."""

import pytest

from harness.evidence.names import check_path, colliding_paths, samples_folder


@pytest.mark.parametrize(
    "path",
    [
        "../outside", "samples/../../outside", "/etc/passwd", "C:/windows", "samples//x", "./plan.json",
        "samples/.", "samples/a\\b", "logs/a b", "logs/caf\u00e9.txt", "logs/cafe\u0301.txt",
        "logs/\u202etxt",
        "logs/a\nb", "", "logs/con", "logs/nul.txt", "logs/trailing.", "a/b/c/d/e/f/g", "logs/" + "x" * 99,
    ],
)  # fmt: skip
def test_a_path_that_could_mean_two_things_or_leave_the_bundle_is_refused(path: str) -> None:
    assert check_path(path) is not None


@pytest.mark.parametrize("path", ["plan.json", "samples/kernels~kda_step~cpu/errors.parquet", "logs/a/b.txt"])
def test_ordinary_paths_are_accepted(path: str) -> None:
    assert check_path(path) is None


def test_two_check_ids_never_share_a_folder() -> None:
    ids = [
        "kernels/a/b",
        "kernels/a:b",
        "kernels/a~b",
        "kernels/A/b",
        "kernels/a/B",
        "kernels/" + "a" * 119,
        "kernels/" + "a" * 118 + "b",
    ]
    folders = [samples_folder(check).casefold() for check in ids if "~" not in check]
    assert len(set(folders)) == len(folders)


def test_the_folder_of_a_plain_id_is_readable() -> None:
    assert samples_folder("kernels/kda_step/cpu.tp1") == "samples/kernels~kda_step~cpu.tp1"


def test_the_longest_check_id_still_gives_a_path_that_bundles_hold() -> None:
    check = "kernels/" + "/".join(["X" * 120] * 4)
    assert check_path(samples_folder(check) + "/samples.json") is None


def test_names_that_differ_only_in_case_collide() -> None:
    assert colliding_paths(["logs/A.txt", "logs/a.txt"]) == (("logs/A.txt", "logs/a.txt"),)


def test_a_file_where_another_path_has_a_folder_collides() -> None:
    assert colliding_paths(["logs/x", "logs/X/y"]) == (("logs/x", "logs/X/y"),)
