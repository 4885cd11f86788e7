"""`fasttrack bundle verify|show|diff|pack|unpack|sign|schema`: look after bundles."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.gate import CacheFolder, TrustedRoot
from harness.cli.selectors import JsonOutput

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Verify, show, compare, pack and sign bundles.")
BundlePath = Annotated[Path, typer.Argument(metavar="BUNDLE", help="Folder or .tar.zst.")]


@app.command()
def verify(
    bundle: BundlePath,
    cache: CacheFolder = None,
    trusted_root: TrustedRoot = None,
    json: JsonOutput = False,
) -> None:
    """Verify a bundle offline: 0 holds together, 2 broken, incomplete or unconfirmed. Plans it again, and
    judges every outcome again.
    """
    from harness.cli.console import print_json
    from harness.cli.gate import memory_of, submission_of
    from harness.domain.bundle import BundleState
    from harness.evidence.verify import conclusion

    memory = memory_of(cache, trusted_root)
    result = submission_of(bundle, bundle.name, memory, trusted_root).verification
    if json:
        print_json(result)
    else:
        for step in result.steps:
            state = (
                "skipped"
                if step.skipped
                else "WRONG"
                if step.problems
                else "incomplete"
                if step.missing
                else "differs"
                if step.differing
                else "ok"
            )
            detail = f": {step.skipped or step.note}" if step.skipped or step.note else ""
            typer.echo(f"{step.number:>2} {step.name:<13} {state:<10} {step.looked_at:>6} looked at{detail}")
            for problem in (*step.problems, *step.missing, *step.differing):
                typer.echo(f"     {problem.path or 'bundle'}: {problem.message}")
        signer = f"signed by {result.signer}" if result.signer else "unsigned"
        typer.echo(f"{conclusion(result)}; {signer}; digest {result.bundle_digest or 'none yet'}")
    raise typer.Exit(0 if result.state is BundleState.VERIFIED else 2)


@app.command()
def show(
    bundle: BundlePath,
    check: Annotated[str | None, typer.Option("--check", help="One check with its samples' tables.")] = None,
    json: JsonOutput = False,
) -> None:
    """Show what a bundle says: change, machine, and every outcome; or one check in full."""
    from harness.cli.console import out, outcome_table, print_json
    from harness.domain.errors import InputError
    from harness.evidence.pack import bundle_folder
    from harness.evidence.reader import open_bundle

    with bundle_folder(bundle) as folder:
        opened = open_bundle(folder)
        if check is not None:
            outcome = opened.outcome(check)
            if outcome is None:
                raise InputError(f"{bundle}: there is no outcome of {check!r}; list them without --check")
            samples = opened.samples(check)
            print_json(
                {
                    "outcome": outcome.model_dump(mode="json"),
                    "samples": None if samples is None else samples.model_dump(mode="json"),
                }
            )
            return
        if json:
            print_json([o.model_dump(mode="json") for o in opened.outcomes])
            return
        plan = opened.plan
        counts = Counter(o.status.value for o in opened.outcomes)
        gpus = ", ".join(g.name for g in plan.machine.gpus) or "no GPU"
        out.print(
            f"claim {plan.claim.name}, policy {plan.policy.name}, tier {plan.tier.value}\n"
            f"{plan.change.repository} {plan.change.base[:12]}..{plan.change.head[:12]}\n"
            f"{plan.machine.cpu_model}, {gpus}\n"
            f"{len(plan.checks)} checks: " + ", ".join(f"{n} {s}" for s, n in sorted(counts.items())),
            markup=False,
        )
        out.print(outcome_table("outcomes", [(o.status.value, o.check, o.summary) for o in opened.outcomes]))


@app.command()
def diff(
    first: BundlePath, second: Annotated[Path, typer.Argument(metavar="OTHER")], json: JsonOutput = False
) -> None:
    """Compare two bundles: environment and dependencies first, then results. 0 alike, 1 not, 2 not
    comparable.
    """
    from harness.cli.console import print_json
    from harness.evidence.diff import diff_bundles
    from harness.evidence.pack import bundle_folder
    from harness.evidence.reader import open_bundle

    with bundle_folder(first) as one, bundle_folder(second) as two:
        found = diff_bundles(open_bundle(one), open_bundle(two))
    if json:
        print_json(found)
    else:
        for title, differences in (("conditions", found.conditions), ("results", found.results)):
            typer.echo(f"{title}: {len(differences) or 'no'} differences")
            for difference in differences:
                typer.echo(f"  {difference.about}: {difference.first} | {difference.second}")
        if not found.is_comparable:
            typer.echo("not comparable: the bundles are of different packs or claims, or share no check")
    raise typer.Exit(2 if not found.is_comparable else 1 if found.conditions or found.results else 0)


@app.command()
def pack(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Folder of a finished run.")],
    out: Annotated[Path | None, typer.Option("--out", help="File to write; default: BUNDLE.tar.zst.")] = None,
) -> None:
    """Pack a bundle into one deterministic .tar.zst."""
    from harness.evidence.pack import pack_bundle

    archive = out or bundle.resolve().with_name(bundle.resolve().name + ".tar.zst")
    typer.echo(pack_bundle(bundle, archive))


@app.command()
def unpack(
    archive: Annotated[Path, typer.Argument(metavar="ARCHIVE")],
    out: Annotated[Path, typer.Option("--out", help="Folder to make.")],
) -> None:
    """Unpack a bundle that somebody else made; nothing is written where it is not sound."""
    from harness.evidence.pack import unpack_bundle

    typer.echo(unpack_bundle(archive, out))


@app.command()
def sign(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Folder of a finished run.")],
    key: Annotated[
        Path | None,
        typer.Option("--key", help="Ed25519 private key, PEM (`openssl genpkey -algorithm ed25519`)."),
    ] = None,
    sigstore: Annotated[
        bool,
        typer.Option("--sigstore", help="Sign by the identity of this CI job, in sigstore's public log."),
    ] = False,
) -> None:
    """Sign a bundle's manifest with a key, or by an identity; prints the signer, as policies name it."""
    from harness.domain.errors import InputError
    from harness.evidence.attestation import load_key, sign_bundle, sign_bundle_by_identity

    if (key is None) != sigstore:
        raise InputError("sign with a key (--key FILE) or by an identity (--sigstore): one of them")
    if key is not None:
        typer.echo(sign_bundle(bundle, load_key(key)))
        return
    sign_bundle_by_identity(bundle)
    typer.echo("signed by the identity of this job; `fasttrack bundle verify --trusted-root FILE` names it")


@app.command()
def schema(
    write: Annotated[
        bool, typer.Option("--write", help="Write the schemas instead of checking them.")
    ] = False,
) -> None:
    """Check that bundles/schema fits the records (0 or 1), or write it."""
    from harness.domain.resources import data_folder
    from harness.evidence.schemas import check_schemas, write_schemas

    folder = data_folder("bundles") / "schema"
    if write:
        for path in write_schemas(folder):
            typer.echo(path.name)
        return
    problems = check_schemas(folder)
    for problem in problems:
        typer.echo(problem)
    raise typer.Exit(1 if problems else 0)
