"""What a confined process can reach: its scratch folder, and nothing else that it could harm."""

import subprocess
from pathlib import Path

import pytest

from harness.executors import confinement
from harness.executors.asked_child import AskedChild, ChildEnded
from harness.executors.confinement import Limits, confined, confinement_here
from harness.executors.sandbox import Sandbox

needs_confinement = pytest.mark.skipif(
    confinement_here() == "none", reason="needs bubblewrap or mount namespaces"
)


def told(scratch: Path, script: str, **limits: int) -> subprocess.CompletedProcess[str]:
    box = confined(("sh", "-c", script), scratch, Limits(**limits), {"GIVEN": "yes"})
    return subprocess.run(
        box.argv, env=box.environment, capture_output=True, text=True, timeout=60, check=False
    )


@needs_confinement
def test_only_the_scratch_folder_can_be_written(tmp_path: Path) -> None:
    scratch, other = tmp_path / "scratch", tmp_path / "other"
    scratch.mkdir()
    other.mkdir()
    done = told(
        scratch, f"echo in > in; echo out > {other}/out; mount -o remount,bind,rw / ; echo out > {other}/out"
    )
    assert (scratch / "in").read_text() == "in\n"
    assert list(other.iterdir()) == []
    assert done.stderr.count("Read-only file system") == 2


@needs_confinement
def test_there_is_no_network_and_no_process_of_others(tmp_path: Path) -> None:
    done = told(tmp_path, "cat /proc/net/dev | wc -l; ls -d /proc/[0-9]* | wc -l; echo $GIVEN")
    interfaces, processes, given = done.stdout.split()
    assert int(interfaces) <= 3  # two lines of heading, and loopback
    assert int(processes) < 6
    assert given == "yes"


@needs_confinement
def test_secrets_of_the_environment_stay_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTTRACK_API_KEY", "hunter2")
    assert "hunter2" not in told(tmp_path, "env").stdout


@needs_confinement
def test_memory_and_files_are_limited(tmp_path: Path) -> None:
    done = told(tmp_path, "ulimit -v; ulimit -f; head -c 2000000 /dev/zero > large; wc -c < large",
                memory_bytes=2**30, file_bytes=2**20)  # fmt: skip
    assert done.stdout.split()[0] == str(2**20)  # KiB
    assert (tmp_path / "large").stat().st_size == 2**20


def test_what_could_not_be_had_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "confinement_here", lambda: "none")
    words = confined(("true",), tmp_path, Limits()).words
    assert words.endswith("files are not protected: neither bubblewrap nor mount namespaces work here")


CHILD = """
import sys, json, time, os
for line in sys.stdin:
    asked = json.loads(line)["do"]
    if asked == "echo": print(json.dumps({"said": asked}), flush=True)
    if asked == "nonsense": print("no json", flush=True)
    if asked == "crash": os.abort()
    if asked == "hang": time.sleep(100)
    if asked == "leave": print("its last words", file=sys.stderr); sys.exit(3)
"""


@pytest.mark.parametrize(("request_", "words"), [
    ("crash", "ended with SIGABRT"),
    ("hang", "no answer after 1 s"),
    ("nonsense", "an answer that is none"),
    ("leave", "ended with exit code 3: its last words"),
])  # fmt: skip
def test_a_child_that_gives_no_answer_is_told_in_words_and_gone(
    tmp_path: Path, request_: str, words: str
) -> None:
    box = Sandbox(("python3", "-u", "-c", CHILD), {"PATH": "/usr/bin:/bin"}, "")
    with AskedChild(box, tmp_path / "log") as child:
        assert child.ask({"do": "echo"}, 20.0) == {"said": "echo"}
        with pytest.raises(ChildEnded) as caught:
            child.ask({"do": request_}, 1.0 if request_ == "hang" else 20.0)
    assert str(caught.value) == words


@needs_confinement
def test_what_a_confined_child_started_ends_with_it(tmp_path: Path) -> None:
    script = "sleep 98765 & sleep 98765 & echo '{\"started\": true}'; wait"
    box = confined(("sh", "-c", script), tmp_path, Limits())
    child = AskedChild(box, tmp_path / "log")
    child.ask({}, 20.0)
    running = subprocess.run(("pgrep", "-f", "^sleep 98765$"), capture_output=True, text=True, check=False)
    assert len(running.stdout.split()) == 2
    child.close()
    left = subprocess.run(("pgrep", "-f", "^sleep 98765$"), capture_output=True, text=True, check=False)
    assert left.stdout == ""
