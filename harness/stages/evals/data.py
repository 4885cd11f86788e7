"""Rows of a task's data set: from the hub at its pinned revision, from files that somebody brought, or
generated.

Every way gives rows in the hub's schema and says where they came from. Files whose sha256 is the pinned one
are the official data wherever they lie; any other file is `local`, and a result over it is about that file
alone. Loading is `datasets`' own; a machine without it reads JSON lines and Parquet by pyarrow.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from harness.domain.errors import InputError
from harness.domain.record import Digest, Record, canonical_bytes, sha256_hex
from harness.domain.resources import data_folder

__all__ = [
    "FOLDER_VARIABLE",
    "O200K_SHA256",
    "Rows",
    "Source",
    "load_rows",
    "load_text",
    "o200k_counter",
    "sources",
    "write_rows",
]

FOLDER_VARIABLE = "FASTTRACK_EVAL_DATA"
"""Folder with the data sets' files below their hub ids, such as `openai/mrcr/2needle/2needle_0.parquet`, and
`o200k_base.tiktoken`; or one file of rows."""
O200K_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
"""Of `o200k_base.tiktoken`, as tiktoken itself checks it."""
_O200K_URL = "https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken"


class Source(Record):
    """A data set's files at a revision."""

    dataset: str
    revision: str
    files: Mapping[str, Digest]
    """sha256 by path in the data set's repository."""


class Rows(NamedTuple):
    """Rows and what they are."""

    rows: Sequence[Mapping[str, Any]]
    kind: Literal["hub", "official_files", "local", "generated"]
    digest: str
    """sha256 over the rows, whichever way they came."""


@lru_cache(maxsize=1)
def sources() -> Mapping[str, Source]:
    """Official sources by task."""
    import yaml  # a bare worker samples embedded tasks without it

    text = (data_folder("evals") / "sources.yaml").read_text(encoding="utf-8")
    return {name: Source.model_validate(fields) for name, fields in yaml.safe_load(text).items()}


def load_rows(task: str, wanted: Literal["official", "local"]) -> Rows:
    """Rows of a task's data set.

    `official`: the pinned files where they lie in the folder, else from the hub at the revision. `local`:
    the one file that the variable names. Raises `InputError` where there are none, or the folder's files
    are others.
    """
    source, place = sources()[task], os.environ.get(FOLDER_VARIABLE)
    if wanted == "local":
        if place is None or not Path(place).is_file():
            raise InputError(f"{FOLDER_VARIABLE} names no file of rows; pass one with `--data FILE`")
        return _rows(_read_files([Path(place)]), "local")
    folder = None if place is None else Path(place) / source.dataset
    if folder is None or not folder.is_dir():
        return _rows(_read_hub(source), "hub")
    paths = [folder / name for name in source.files]
    wrong = [p.name for p in paths if not p.is_file() or _file_digest(p) != source.files[_name(p, folder)]]
    if wrong:
        raise InputError(
            f"{folder} lacks {', '.join(wrong)} of {source.dataset} at {source.revision[:12]}, or "
            "holds other bytes; download that revision, or run another file with `--data FILE`"
        )
    return _rows(_read_files(paths), "official_files")


def load_text() -> bytes:
    """The one text that the variable names; raises `InputError` where there is none."""
    place = os.environ.get(FOLDER_VARIABLE)
    if place is None or not Path(place).is_file() or not (text := Path(place).read_bytes()):
        raise InputError(f"{FOLDER_VARIABLE} names no file of text; pass one with `--data FILE`")
    return text


def write_rows(rows: Sequence[Mapping[str, Any]], folder: Path, name: str) -> Rows:
    """Rows through a Parquet file and back, as the hub's files come; `kind` is `generated`."""
    import pyarrow
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{sha256_hex(canonical_bytes([dict(r) for r in rows]))[:16]}.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), path)
    return _rows(_read_files([path]), "generated")


def o200k_counter() -> Callable[[str], int]:
    """Counts tokens of o200k_base, from tiktoken's file in the folder or from tiktoken's own cache.

    Raises `InputError` where tiktoken is missing, or the file is none or another.
    """
    try:
        import tiktoken
    except ImportError as error:
        raise InputError("bands of MRCR are in o200k tokens; `pip install tiktoken`") from error
    place = os.environ.get(FOLDER_VARIABLE)
    file = Path(place) / "o200k_base.tiktoken" if place is not None and Path(place).is_dir() else None
    if file is not None and file.is_file():
        if _file_digest(file) != O200K_SHA256:
            raise InputError(f"{file} is not tiktoken's o200k_base (sha256 is not {O200K_SHA256[:12]}...)")
        encoding = _with_cached(file, lambda: tiktoken.get_encoding("o200k_base"))
    else:
        try:
            encoding = tiktoken.get_encoding("o200k_base")
        except (OSError, ValueError) as error:
            raise InputError(
                f"tiktoken's o200k_base is not here and cannot be downloaded ({type(error).__name__}); put "
                f"o200k_base.tiktoken into the folder that {FOLDER_VARIABLE} names"
            ) from error
    return lambda text: len(encoding.encode(text, disallowed_special=()))


def _with_cached(file: Path, load: Callable[[], Any]) -> Any:
    """`load` while tiktoken's cache is a folder that holds this file under the name that tiktoken looks
    for.
    """
    import shutil
    import tempfile

    before = os.environ.get("TIKTOKEN_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(file, Path(folder) / hashlib.sha1(_O200K_URL.encode(), usedforsecurity=False).hexdigest())
        os.environ["TIKTOKEN_CACHE_DIR"] = folder
        try:
            return load()
        finally:
            os.environ.pop("TIKTOKEN_CACHE_DIR")
            if before is not None:
                os.environ["TIKTOKEN_CACHE_DIR"] = before


def _read_hub(source: Source) -> Sequence[Mapping[str, Any]]:
    if find_spec("datasets") is None:
        raise InputError(
            f"{source.dataset} comes from the hub through `datasets`, which is not installed; install the "
            f"evals extra, or bring the files and set {FOLDER_VARIABLE}"
        )
    import datasets

    datasets.disable_progress_bars()
    try:
        found = datasets.load_dataset(
            source.dataset, revision=source.revision, data_files=list(source.files), split="train"
        )
    except (OSError, ValueError, ConnectionError, datasets.exceptions.DatasetsError) as error:
        raise InputError(
            f"{source.dataset} at {source.revision[:12]} cannot be loaded from the hub "
            f"({type(error).__name__}: {str(error)[:160]}); bring its files and "
            f"set {FOLDER_VARIABLE}, or use `--data fixture`"
        ) from error
    return [dict(row) for row in found]


def _read_files(paths: Sequence[Path]) -> Sequence[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    for path in paths:
        if path.suffix not in (".parquet", ".jsonl"):
            raise InputError(f"{path} is neither Parquet nor JSON lines")
        rows += _read_parquet(path) if path.suffix == ".parquet" else _read_lines(path)
    return rows


def _read_parquet(path: Path) -> Sequence[Mapping[str, Any]]:
    if find_spec("datasets") is not None:
        import datasets

        datasets.disable_progress_bars()
        return [dict(row) for row in datasets.Dataset.from_parquet(str(path), keep_in_memory=True)]
    from pyarrow import parquet

    return [dict(row) for row in parquet.read_table(path).to_pylist()]


def _read_lines(path: Path) -> Sequence[Mapping[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def _rows(
    rows: Sequence[Mapping[str, Any]], kind: Literal["hub", "official_files", "local", "generated"]
) -> Rows:
    total = hashlib.sha256()
    for row in rows:
        total.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return Rows(rows, kind, total.hexdigest())


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
