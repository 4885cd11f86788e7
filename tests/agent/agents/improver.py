"""Reads the contract, asks the journal, and replaces a loop over rows by one product."""

import re
from typing import Any

from client import HERE, OP, call, in_session

FAST = "        out.copy_(torch.mm(x.float(), weight.float().T))\n"


async def work(session: Any) -> None:
    contract = await call(session, "read_contract", op=OP)
    (name,) = contract["editable"]
    place = HERE / name
    text = place.read_text()
    place.write_text(re.sub(r"        for row in range.*\Z", FAST, text, flags=re.DOTALL))
    result = await call(
        session, "submit_attempt", op=OP, question="Do rows share the weight's conversion?",
        predicted="several times as fast: the weight is widened once, not once a row", next="stop",
    )  # fmt: skip
    print(result["stage"], result["words"])


in_session(work)
