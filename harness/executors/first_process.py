"""The first process of namespaces of its own: it closes what leads outside, starts the command and waits.

`python -I -S first_process.py FORM SCRATCH HOME HAS_GPU SOCKETS COMMAND...`, as the superuser of a user
namespace with mounts, processes and mostly a network of its own (see `namespaces`). Whatever form: the
kernel's settings below /proc and /sys are read-only, and disks, the kernel's memory and the sockets of a JSON
list are behind /dev/null. `sealed`: all files are read-only but those of the scratch folder, /dev holds a few
harmless devices and those of GPUs where they are wanted, and the home folder is empty. What cannot be made
read-only is hidden. Then all capabilities go but two, which reach nothing outside: that of mapping a
superuser into a further namespace, as what runs inside may put a candidate of its own into such a box, and
that of handing open files between processes of the box, as ranks on several GPUs do.

Needs the standard library alone. Exit code: the command's; 128 and the signal's number where one ended it;
125 where the box could not be made.
"""

import contextlib
import ctypes
import fcntl
import glob
import json
import os
import re
import socket
import stat
import struct
import sys
from pathlib import Path

RDONLY, REMOUNT, BIND, REC = 1, 32, 4096, 16384
KEPT_FLAGS = {"nosuid": 2, "nodev": 4, "noexec": 8, "noatime": 1024, "nodiratime": 2048, "relatime": 1 << 21}
"""Of a mount, which a namespace within may not take off."""
KERNEL = ("sys", "sysrq-trigger", "irq", "bus", "fs", "scsi", "acpi", "mtrr", "driver")
"""Below /proc: settings, not processes."""
MEMORY = ("/proc/kcore", "/proc/keys", "/dev/mem", "/dev/port", "/dev/kmsg", "/dev/kvm")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
GPU_DEVICES = ("nvidia*", "nvidia-caps/*", "nvidia-caps-imex-channels/*", "kfd", "dri/*")
SHARED_MEMORY = "size=256m"
KEPT_CAPABILITIES = (19, 31)
"""CAP_SYS_PTRACE and CAP_SETFCAP."""
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38
CAPABILITY_VERSION = 0x20080522
UNBOXED = 125
SCSI_GENERIC = 21
"""Major number of character devices that pass commands to disks."""
LIBC = ctypes.CDLL(None, use_errno=True)


def main(argv: list[str]) -> int:
    """Close what leads outside, run the command, and give its exit code."""
    form, scratch, home, has_gpu, sockets, *command = argv
    try:
        if form == "sealed":
            _mount(scratch, scratch, flags=BIND)
        for place, options in _mounts():
            is_kernel = place == "/sys" or place.startswith("/sys/")
            if is_kernel or (form == "sealed" and not _is_own(place) and place != scratch):
                _seal(place, options)
        for name in KERNEL:
            if os.path.exists(f"/proc/{name}"):
                _mount(f"/proc/{name}", f"/proc/{name}", flags=BIND | REC)
                _seal(f"/proc/{name}", "")
        for place in (*filter(os.path.exists, MEMORY), *filter(_is_disk, _devices())):
            _mount("/dev/null", place, flags=BIND)
        for place in json.loads(sockets):
            _cover(place)
        if form == "sealed":
            _own_devices(bool(has_gpu))
            if home:
                _mount("none", home, "tmpfs", data="size=1m")
            os.chdir(scratch)
        _raise_loopback()
        _drop_capabilities()
    except OSError as error:
        sys.stderr.write(f"no box can be made here: {error}\n")
        return UNBOXED
    return _run(command)


def _run(command: list[str]) -> int:
    """Start the command; reap whatever ends until it does."""
    child = os.fork()
    if child == 0:
        try:
            os.execvp(command[0], command)
        except OSError as error:
            sys.stderr.write(f"{command[0]} cannot be started: {error}\n")
        sys.stderr.flush()
        os._exit(UNBOXED + 2)
    nothing = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)  # whoever reads the command's output sees its end
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _mounts() -> list[tuple[str, str]]:
    """(place, options) of every mount that is here now."""
    lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    fields = [line.split(" ") for line in lines]
    return [(re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), f[1]), f[3]) for f in fields]


def _seal(place: str, options: str) -> None:
    """Make a mount read-only; hide it where that is refused."""
    kept = sum(KEPT_FLAGS.get(word, 0) for word in options.split(","))
    try:
        _mount("none", place, flags=REMOUNT | BIND | RDONLY | kept)
    except OSError:
        if os.path.isdir(place):
            _mount("none", place, "tmpfs", RDONLY, "size=4k")
        elif os.path.exists(place):
            _mount("/dev/null", place, flags=BIND)


def _cover(place: str) -> None:
    """Put nothing in a socket's place; one that went away meanwhile leads nowhere any more."""
    try:
        _mount("/dev/null", place, flags=BIND)
    except OSError:
        if os.path.lexists(place):
            raise


def _own_devices(has_gpu: bool) -> None:
    """Another /dev, made in what was its shared memory and laid over it."""
    new = Path("/dev/shm")
    _mount("none", str(new), "tmpfs", data="size=1m,mode=755")
    found = [place for pattern in GPU_DEVICES for place in glob.glob(f"/dev/{pattern}")] if has_gpu else []
    for place in (*(f"/dev/{name}" for name in DEVICES), *found):
        if not os.path.exists(place) or not stat.S_ISCHR(os.stat(place).st_mode):
            continue
        target = new / Path(place).relative_to("/dev")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
        _mount(place, str(target), flags=BIND)
    (new / "shm").mkdir()
    for name, of in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        (new / name).symlink_to(f"/proc/self/fd{of}")
    _mount(str(new), "/dev", flags=BIND | REC)
    _mount("none", "/dev", flags=REMOUNT | BIND | RDONLY)
    _mount("none", "/dev/shm", "tmpfs", data=SHARED_MEMORY)


def _raise_loopback() -> None:
    """Processes of one box may talk to each other; in a network that is not ours this is refused."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        fcntl.ioctl(one, 0x8914, struct.pack("16sh", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS: up, running


def _drop_capabilities() -> None:
    """Of this process and of all that it starts."""
    for capability in set(range(64)).difference(KEPT_CAPABILITIES):
        LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    kept = sum(1 << capability for capability in KEPT_CAPABILITIES)
    header = struct.pack("II", CAPABILITY_VERSION, 0)
    sets = struct.pack("6I", kept, kept, 0, 0, 0, 0)
    if LIBC.capset(header, sets) or LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "privileges could be kept or gained")


def _is_own(place: str) -> bool:
    """Whether a mount belongs to what a box has of its own: processes and devices."""
    return place.split("/")[1] in ("proc", "dev")


def _devices() -> list[str]:
    """Everything below /dev, without following links."""
    return [os.path.join(folder, name) for folder, _, names in os.walk("/dev") for name in names]


def _is_disk(place: str) -> bool:
    """Block devices, and the generic door to disks (`sg`)."""
    try:
        status = os.stat(place)
    except OSError:
        return False
    return stat.S_ISBLK(status.st_mode) or (
        stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) == SCSI_GENERIC
    )


def _mount(source: str, target: str, kind: str = "none", flags: int = 0, data: str = "") -> None:
    if LIBC.mount(os.fsencode(source), os.fsencode(target), kind.encode(), flags, data.encode()):
        number = ctypes.get_errno()
        raise OSError(number, f"mount {target}: {os.strerror(number)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
