"""`fasttrack doctor`: what this machine can and cannot prove."""

from importlib import metadata

import typer

from harness.cli.selectors import JsonOutput

__all__ = ["app"]

app = typer.Typer()
NEEDS = (
    ("nvidia-cutlass-dsl", "audit: compiling CuTe DSL kernels", "gpu"),
    ("lm-eval", "evals through lm-eval", "evals"),
    ("torch", "kernels, coverage, evals, sweep", "cpu"),
    ("ray", "--executor ray", "ray"),
)
"""(distribution, what needs it, extra that brings it)."""


@app.command()
def doctor(json: JsonOutput = False) -> None:
    """Say what this machine can and cannot prove; --json prints the machine record that `plan --machine`
    takes.
    """
    from harness.cli.console import out, print_json
    from harness.engines.packs import installed_packs
    from harness.measure.machine import read_machine

    machine = read_machine()
    if json:
        print_json(machine)
        return
    out.print(
        f"{machine.cpu_model}, {machine.cpu_count} cores, {machine.memory_bytes / 2**30:.0f} GiB; "
        f"{machine.platform}"
    )
    for gpu in machine.gpus:
        named = gpu.arch or "no architecture that a claim can name"
        out.print(f"{gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB, {named}; driver {machine.driver}")
    if not machine.gpus:
        out.print("no GPU: run evidence from here is at tier smoke; kernels are still compiled and audited")
    out.print(f"strongest tier: {machine.best_tier.value}; packs: {', '.join(installed_packs()) or 'none'}")
    for name, what, extra in NEEDS:
        try:
            out.print(f"  {name} {metadata.version(name)}: {what}")
        except metadata.PackageNotFoundError:
            out.print(f"  {name} is missing: no {what}; pip install 'fasttrack[{extra}]'", markup=False)
