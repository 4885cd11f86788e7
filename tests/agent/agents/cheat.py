"""Submits, one after another, the candidates that lie in the folder it is told."""

import sys
from pathlib import Path
from typing import Any

from client import HERE, OP, call, in_session


async def work(session: Any) -> None:
    contract = await call(session, "read_contract", op=OP)
    (name,) = contract["editable"]
    for candidate in sorted(Path(sys.argv[1]).glob("*.py")):
        (HERE / name).write_text(candidate.read_text())
        result = await call(session, "submit_attempt", op=OP, question=candidate.stem, predicted="a pass")
        print(candidate.stem, result["stage"], result["words"][:200], flush=True)


in_session(work)
