"""`fasttrack audit`: read compiled kernels that no pack describes, and write down what a pack's kernels cost.

The audit of a pack is the stage: `fasttrack run audit`.
"""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(
    help="Read compiled kernels outside a pack; commit what a pack's kernels cost. (A pack: `run audit`.)",
    no_args_is_help=True,
)


@app.command()
def read(
    file: Annotated[Path, typer.Argument(help="A cubin, a shared library with device code, or a wheel.")],
    match: Annotated[str, typer.Option(help="Only cubins whose name contains this.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="At most this many cubins, evenly spread.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """What can be read of foreign machine code, and what cannot. 0: all was read; 1: not; 2: none there."""
    from harness.cli.console import err, out, print_json
    from harness.stages.audit.foreign import REPORTS, cubins_in, read_cubin

    found = []
    with cubins_in(file, match, limit) as cubins:
        for number, cubin in enumerate(cubins, 1):
            err.print(f"[{number}/{len(cubins)}] {cubin.name}", markup=False, soft_wrap=True)
            found.append(read_cubin(cubin))
    reports = tuple(found)
    is_whole = all(not r.error and not r.unread for r in reports)
    if as_json:
        print_json(REPORTS.dump_python(reports, mode="json"))
        raise typer.Exit(0 if is_whole else 1)
    for report in reports:
        out.print(f"{report.name} ({report.target or 'target unknown'})", markup=False, soft_wrap=True)
        if report.error:
            out.print(f"  could not be read: {report.error}", markup=False, soft_wrap=True)
        for kernel in report.kernels:
            waits = (
                "never waits for its predecessor"
                if kernel.before_wait is None
                else f"{kernel.before_wait} before the wait"
            )
            out.print(
                f"  {kernel.name[:60]}: {kernel.registers} registers, {kernel.frame_bytes} bytes of frame, "
                f"{kernel.instructions} instructions; {kernel.accesses} accesses, {kernel.traced} traced to "
                f"parameters, {waits}"
                + (f"; {kernel.unresolved} jumps unresolved" if kernel.unresolved else ""),
                markup=False,
                soft_wrap=True,
            )
        for line in report.unread_examples:
            out.print(f"  not understood: {line}", markup=False, soft_wrap=True)
    kernels = sum(len(r.kernels) for r in reports)
    unread = sum(r.unread for r in reports)
    out.print(
        f"{kernels} kernels in {len(reports)} cubins; {unread} lines were not understood. Nothing is judged: "
        "no pack says what the parameters are.",
        soft_wrap=True,
    )
    raise typer.Exit(0 if is_whole else 1)


@app.command()
def expect(
    bundle: Annotated[Path, typer.Argument(help="A bundle whose audit passed, in full for all variants.")],
    output: Annotated[Path, typer.Option("--out", help="File of expectations to write, as a pack reads it.")],
    accept_spills: Annotated[
        bool, typer.Option("--accept-spills", help="Write spills down as expected, too: you looked at each.")
    ] = False,
    accept_looser: Annotated[
        str | None,
        typer.Option(
            "--accept-looser", help="Why limits may be looser than in the file; it keeps the reason."
        ),
    ] = None,
) -> None:
    """Write what the audited kernels cost as the limits of later audits; read the diff before you commit.

    Of an audit without `--full`, or with `--only`, the limits of other kernels in the file stay.
    """
    import json

    from harness.cli.console import out
    from harness.evidence.pack import bundle_folder
    from harness.evidence.reader import open_bundle
    from harness.stages.audit.expectations import accepted, expectations, merged, render_expectations
    from harness.stages.audit.limits import ACCEPTED

    with bundle_folder(bundle) as folder:
        opened = open_bundle(folder)
        checks = opened.plan.checks
        found = expectations(checks, opened.outcomes, accepts_spills=accept_spills)
    old = json.loads(output.read_text()) if output.is_file() else {}
    limits = {name: value for name, value in old.items() if name != ACCEPTED}
    written = merged(limits, found, checks, opened.plan.only)
    looser = accepted(old, written, accept_looser)
    output.write_text(render_expectations(written, looser))
    out.print(
        f"{output}: {len(found)} kernel variants audited, {len(written)} written, "
        f"{sum(map(len, looser.values()))} looser limits accepted",
        markup=False,
        soft_wrap=True,
    )
