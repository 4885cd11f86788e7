"""A bundle as one `.tar.zst`, the same bytes for the same bundle, and unpacking one that somebody else made.

Packing writes plain USTAR headers with nothing of the machine in them (owner, time, mode), files in manifest
order. Unpacking reads that and nothing else: any entry that is no regular file, any path that `check_path`
refuses and any size over the limits stops it, and nothing is left behind. The archive's digest depends on the
zstd release, so a bundle is named by its manifest's digest.
"""

import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import zstandard

from harness.domain.errors import EvidenceError, InputError
from harness.evidence.integrity import MAX_FILES
from harness.evidence.names import ATTESTATION, MANIFEST, PLAN, check_path, colliding_paths
from harness.evidence.reader import open_bundle
from harness.evidence.strict_json import open_regular

__all__ = ["bundle_folder", "own_copy", "pack_bundle", "read_packed", "unpack_bundle"]

LEVEL = 10
BLOCK = 512
CHUNK = 2**20
MAX_UNPACKED_BYTES = 16 * 2**30
MAX_RATIO = 2000
"""Unpacked over packed bytes; text logs reach a few hundred."""
FREE_BYTES = 64 * 2**20
"""Below this much the ratio is not looked at."""


def pack_bundle(folder: Path, archive: Path) -> Path:
    """Pack a finished bundle; raises `EvidenceError` for an unfinished run, `InputError` where the archive
    exists already.
    """
    bundle = open_bundle(folder)
    if bundle.manifest is None:
        raise EvidenceError(f"{folder}: the run has not finished; go on with --resume, then pack it")
    if archive.exists():
        raise InputError(f"{archive} exists already; choose another name")
    names = [MANIFEST, *(f.path for f in bundle.manifest.files)]
    if (folder / ATTESTATION).exists():
        names.append(ATTESTATION)
    temporary = archive.with_name(archive.name + ".writing")
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True, threads=0)
    with temporary.open("wb") as raw, compressor.stream_writer(raw, closefd=False) as out:
        for name in names:
            _write_entry(out, folder, name)
        out.write(bytes(2 * BLOCK))
    temporary.replace(archive)
    return archive


def unpack_bundle(
    archive: Path, destination: Path, max_bytes: int = MAX_UNPACKED_BYTES, shown: Path | None = None
) -> Path:
    """Unpack into `destination`, which must not exist; raises `EvidenceError`, which calls the archive
    `shown`, and leaves nothing behind.
    """
    shown = shown or archive
    if destination.exists():
        raise InputError(f"{destination} exists already; choose another folder")
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=destination.parent))
    try:
        with archive.open("rb") as raw:
            limit = min(max_bytes, max(FREE_BYTES, MAX_RATIO * archive.stat().st_size))
            _unpack(raw, temporary, limit)
        temporary.chmod(0o755)
        temporary.rename(destination)
    except (zstandard.ZstdError, tarfile.HeaderError, OSError, ValueError) as error:
        raise EvidenceError(f"{shown}: is no packed bundle: {error}") from error
    except EvidenceError as error:
        raise EvidenceError(f"{shown}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return destination


def read_packed(archive: Path, names: Mapping[str, int]) -> dict[str, bytes]:
    """Some files of a packed bundle, by name, each of at most as many bytes as `names` says; what the archive
    lacks is left out. Reads no further than the last of them and writes nothing; raises `EvidenceError`.
    """
    found: dict[str, bytes] = {}
    try:
        with archive.open("rb") as raw:
            left = max(FREE_BYTES, MAX_RATIO * archive.stat().st_size)
            decompressor = zstandard.ZstdDecompressor(max_window_size=2**27)
            with decompressor.stream_reader(raw, read_across_frames=False, closefd=False) as source:
                while len(found) < len(names) and (entry := _read_header(source)) is not None:
                    left -= entry.size + BLOCK
                    if left < 0 or entry.size > names.get(entry.name, MAX_UNPACKED_BYTES):
                        raise EvidenceError(f"entry {entry.name[:80]!r} is over the size limit")
                    if entry.name in found:
                        raise EvidenceError(f"holds {entry.name!r} twice")
                    if entry.name in names:
                        found[entry.name] = _read_exactly(source, entry.size)
                    else:
                        _skip(source, entry.size)
                    _read_exactly(source, -entry.size % BLOCK)
    except (zstandard.ZstdError, tarfile.HeaderError, OSError, ValueError) as error:
        raise EvidenceError(f"{archive}: is no packed bundle: {error}") from error
    except EvidenceError as error:
        raise EvidenceError(f"{archive}: {error}") from error
    return found


@contextmanager
def bundle_folder(path: Path, shown: Path | None = None) -> Iterator[Path]:
    """A bundle's folder, for a folder or a packed bundle; what was unpacked is removed afterwards. `shown` is
    what a copy goes by in words.
    """
    shown = shown or path
    if path.is_dir():
        if not any(map(os.path.lexists, (path / PLAN, path / MANIFEST))):
            raise InputError(f"{shown}: no bundle lies in this folder; give a run's folder, or a .tar.zst")
        yield path
        return
    if not path.is_file():
        raise InputError(f"{shown}: there is no bundle here; give its folder or its .tar.zst")
    with tempfile.TemporaryDirectory(prefix="fasttrack-") as scratch:
        name = path.name.removesuffix(".zst").removesuffix(".tar") or "bundle"
        yield unpack_bundle(path, Path(scratch) / name, shown=shown)


@contextmanager
def own_copy(path: Path) -> Iterator[Path | None]:
    """A folder's or an archive's files as they are read now, where nobody else can change them; None where
    they are more than any bundle may hold.

    What is no plain file with one name stays none within a folder, so that verifying finds it: it becomes a
    link to nowhere. An archive may have several names, as nobody writes to the copy.
    """
    with tempfile.TemporaryDirectory(prefix="fasttrack-") as scratch:
        own = Path(scratch) / path.name
        below = ((Path(at) / name) for at, folders, files in os.walk(path) for name in (*folders, *files))
        left = MAX_UNPACKED_BYTES
        is_whole = True
        try:
            for number, place in enumerate((path, *below)):
                left -= _copied(place, own / place.relative_to(path), left, place != path)
                is_whole = left >= 0 and number <= 2 * MAX_FILES
                if not is_whole:
                    break
        except OSError as error:
            raise InputError(
                f"{path} cannot be copied to verify it ({error}): it changed while it was read, or there is "
                "no room; hand in what nobody writes to, and name a larger TMPDIR"
            ) from error
        yield own if is_whole else None


def _copied(place: Path, target: Path, most: int, is_within: bool) -> int:
    """Bytes that were copied: more than `most` where a file goes on."""
    if place.is_dir() and not place.is_symlink():
        target.mkdir()
        return 0
    copied = 0
    try:
        with os.fdopen(_opened(place, is_within), "rb") as source, target.open("xb") as out:
            while copied <= most and (chunk := source.read(CHUNK)):
                copied += out.write(chunk)
    except (EvidenceError, OSError):
        target.unlink(missing_ok=True)
        target.symlink_to("nowhere")
    return copied


def _opened(place: Path, is_within: bool) -> int:
    """File descriptor; raises `EvidenceError` for what `_copied` may not copy."""
    if is_within or not place.is_file():
        return open_regular(place)
    return os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _write_entry(out: BinaryIO, folder: Path, name: str) -> None:
    with os.fdopen(open_regular(folder / name), "rb") as file:
        entry = tarfile.TarInfo(name)
        entry.size = os.fstat(file.fileno()).st_size
        out.write(entry.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict"))
        shutil.copyfileobj(file, out, CHUNK)
    out.write(bytes(-entry.size % BLOCK))


def _unpack(raw: BinaryIO, folder: Path, max_bytes: int) -> None:
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**27)
    names: list[str] = []
    total = 0
    with decompressor.stream_reader(raw, read_across_frames=False, closefd=False) as source:
        while (entry := _read_header(source)) is not None:
            names.append(entry.name)
            total += entry.size + BLOCK
            if total > max_bytes or len(names) > MAX_FILES:
                raise EvidenceError(f"unpacks to over {max_bytes} bytes or {MAX_FILES} files")
            _extract(source, entry, folder)
        if _read_exactly(source, BLOCK) != bytes(BLOCK) or source.read(1):
            raise EvidenceError("goes on after its end")
    if raw.read(1):
        raise EvidenceError("goes on after its end")
    if pairs := colliding_paths(names):
        raise EvidenceError(f"holds {pairs[0][0]!r} and {pairs[0][1]!r}, one file on some systems")


def _read_header(source: BinaryIO) -> tarfile.TarInfo | None:
    """The next entry, checked, or None at the end."""
    block = _read_exactly(source, BLOCK)
    if block == bytes(BLOCK):
        return None
    entry = tarfile.TarInfo.frombuf(block, "ascii", "strict")
    if entry.type != tarfile.REGTYPE or entry.size < 0:
        raise EvidenceError(f"entry {entry.name[:80]!r} is a link, a device or another special entry")
    if (reason := check_path(entry.name)) is not None:
        raise EvidenceError(f"entry {entry.name[:80]!r} {reason}")
    return entry


def _extract(source: BinaryIO, entry: tarfile.TarInfo, folder: Path) -> None:
    path = folder / entry.name
    path.parent.mkdir(parents=True, exist_ok=True)
    left = entry.size
    with path.open("xb") as file:
        while left:
            chunk = _read_exactly(source, min(left, CHUNK))
            file.write(chunk)
            left -= len(chunk)
    _read_exactly(source, -entry.size % BLOCK)


def _skip(source: BinaryIO, size: int) -> None:
    while size:
        size -= len(_read_exactly(source, min(size, CHUNK)))


def _read_exactly(source: BinaryIO, size: int) -> bytes:
    parts = []
    while size:
        part = source.read(size)
        if not part:
            raise EvidenceError("is cut off")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
