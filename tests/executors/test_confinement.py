"""What a confined process can reach: its scratch folder, and nothing else that it could harm."""

import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from harness.executors import confinement
from harness.executors.asked_child import AskedChild, ChildEnded
from harness.executors.confinement import Limits, confined, confinement_here, confines
from harness.executors.namespaces import can_run, own_namespaces
from harness.executors.sandbox import Sandbox

needs_confinement = pytest.mark.skipif(
    confinement_here() == "none", reason="needs bubblewrap or mount namespaces"
)
KINDS = [
    pytest.param(kind, marks=pytest.mark.skipif(not confines(kind), reason=f"{kind} does not work here"))
    for kind in ("bubblewrap", "unshare")
]


@pytest.fixture(params=KINDS)
def each_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever confines here is tried, not only what would be taken."""
    monkeypatch.setattr(confinement, "confinement_here", lambda: request.param)


ROOT = Path(__file__).resolve().parents[2]
FORGE = """
import glob, os, sys
for place in (*glob.glob("/proc/[0-9]*"), f"/proc/{os.getppid()}", f"/proc/{sys.argv[1]}"):
    if place in ("/proc/self", f"/proc/{os.getpid()}"):
        continue
    for name in ("1", "2"):
        try:
            with open(f"{place}/fd/{name}", "a") as file:
                file.write("a forged verdict\\n")
        except OSError:
            pass
print("tried")
"""


def told(scratch: Path, script: str, **limits: int) -> subprocess.CompletedProcess[str]:
    box = confined(("sh", "-c", script), scratch, Limits(**limits), {"GIVEN": "yes"})
    return subprocess.run(
        box.argv, env=box.environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.usefixtures("each_kind")
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


@pytest.mark.usefixtures("each_kind")
def test_there_is_no_network_and_no_process_of_others(tmp_path: Path) -> None:
    done = told(tmp_path, "cat /proc/net/dev | wc -l; ls -d /proc/[0-9]* | wc -l; echo $GIVEN")
    interfaces, processes, given = done.stdout.split()
    assert int(interfaces) <= 3  # two lines of heading, and loopback
    assert int(processes) < 6
    assert given == "yes"


@pytest.mark.usefixtures("each_kind")
def test_sockets_that_lie_as_files_outside_do_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confinement, "SETTLED_S", 0.0)
    scratch, moved = tmp_path / "scratch", Path(tempfile.mkdtemp(dir="/tmp")) / "moved.sock"
    scratch.mkdir()
    ask = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1]); print('answered')"
    said = {}
    for place in (tmp_path / "engine.sock", moved, scratch / "own.sock"):
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"{place}.first" if place == moved else str(place))
            server.listen()
            if place == moved:
                Path(f"{place}.first").rename(place)
            said[place.name] = told(scratch, f'{sys.executable} -c "{ask}" {place}').stdout
    assert said == {"engine.sock": "", "moved.sock": "", "own.sock": "answered\n"}


def test_a_socket_that_went_away_does_not_break_the_box(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "gone.sock"))
        (tmp_path / "scratch").mkdir()
        wrapper = own_namespaces("sealed", has_network=False, scratch=tmp_path / "scratch")
        assert str(tmp_path / "gone.sock") in " ".join(wrapper)
        (tmp_path / "gone.sock").unlink()
    if confines("unshare"):
        assert can_run(wrapper)


@pytest.mark.usefixtures("each_kind")
def test_secrets_of_the_environment_stay_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTTRACK_API_KEY", "hunter2")
    assert "hunter2" not in told(tmp_path, "env").stdout


@pytest.mark.usefixtures("each_kind")
def test_memory_and_files_are_limited(tmp_path: Path) -> None:
    done = told(tmp_path, "ulimit -v; ulimit -f; head -c 2000000 /dev/zero > large; wc -c < large",
                memory_bytes=2**30, file_bytes=2**20)  # fmt: skip
    assert done.stdout.split()[0] == str(2**20)  # KiB
    assert (tmp_path / "large").stat().st_size == 2**20


SETTINGS = (
    "/proc/sys/kernel/core_uses_pid", "/proc/sys/vm/swappiness", "/proc/sysrq-trigger", "/proc/irq/x",
    "/sys/kernel/mm/ksm/run", "/sys/fs/cgroup/x", "/sys/fs/cgroup/pids/x",
)  # fmt: skip


@pytest.mark.usefixtures("each_kind")
def test_no_setting_of_the_machine_can_be_written(tmp_path: Path) -> None:
    script = "umount /proc/sys; mount -o remount,bind,rw /sys; for at in $PLACES; do umount $at; "
    script += "if [ -e $at ]; then was=$(cat $at); fi; (echo $was > $at) && echo $at; done"
    assert told(tmp_path, f"PLACES='{' '.join(SETTINGS)}'; {script}").stdout == ""


@pytest.mark.usefixtures("each_kind")
def test_no_disk_and_no_capability_over_what_is_outside_is_left(tmp_path: Path) -> None:
    count = "for at in /dev/*; do if [ -b $at ]; then echo x; fi; done | wc -l"
    disks, effective = told(tmp_path, f"{count}; sed -n 's/^CapEff:.//p' /proc/self/status").stdout.split()
    assert disks == "0"
    # What is left may map a superuser into a namespace within, and open files of the box's own processes.
    assert int(effective, 16) & ~(1 << 31 | 1 << 19) == 0


@pytest.mark.usefixtures("each_kind")
def test_a_candidate_within_cannot_write_to_the_output_of_the_command_that_judges_it(tmp_path: Path) -> None:
    starter = (
        "import os, subprocess, sys\n"
        "from harness.executors.sandbox import sandboxed\n"
        f"box = sandboxed((sys.executable, '-c', {FORGE!r}, str(os.getpid())))\n"
        "done = subprocess.run(box.argv, env=box.environment, capture_output=True, text=True)\n"
        "print(done.stdout.strip() or done.stderr, flush=True)"
    )
    box = confined((sys.executable, "-c", starter), tmp_path, Limits(), {"PYTHONPATH": str(ROOT)})
    with (tmp_path / "out").open("wb") as sink:
        subprocess.run(box.argv, env=box.environment, stdout=sink, timeout=60, check=True)
    assert (tmp_path / "out").read_text() == "tried\n"


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


@pytest.mark.usefixtures("each_kind")
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
