"""`fasttrack`: the table of commands and the one place that turns errors into exit codes.

Invariant: exit 1 means *rejected* and nothing else. A crash, an abort or bad input of ours ends as 2, an
interrupt as 130. Command modules load on use, so that `fasttrack --help` is quick.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from harness import __version__
from harness.domain.errors import FasttrackError

__all__ = ["app", "entry"]


def _validate() -> Any:
    from harness.cli.validate import app

    return typer.main.get_command(app)


def _plan() -> Any:
    from harness.cli.plan import app

    return typer.main.get_command(app)


def _run() -> Any:
    from harness.cli.run import app

    return typer.main.get_command(app)


def _worker() -> Any:
    from harness.cli.worker import worker_app

    return typer.main.get_command(worker_app)


def _collect() -> Any:
    from harness.cli.worker import collect_app

    return typer.main.get_command(collect_app)


def _doctor() -> Any:
    from harness.cli.doctor import app

    return typer.main.get_command(app)


def _policy() -> Any:
    from harness.cli.policy import app

    return typer.main.get_command(app)


def _kernels() -> Any:
    from harness.cli.kernels import app

    return typer.main.get_command(app)


def _evals() -> Any:
    from harness.cli.evals import app

    return typer.main.get_command(app)


def _sweep() -> Any:
    from harness.cli.sweep import app

    return typer.main.get_command(app)


def _audit() -> Any:
    from harness.cli.audit import app

    return typer.main.get_command(app)


def _recipe() -> Any:
    from harness.cli.recipe import app

    return typer.main.get_command(app)


def _faults() -> Any:
    from harness.cli.faults import app

    return typer.main.get_command(app)


def _bundle() -> Any:
    from harness.cli.bundle import app

    return typer.main.get_command(app)


def _gate() -> Any:
    from harness.cli.gate import app

    return typer.main.get_command(app)


def _reproduce() -> Any:
    from harness.cli.reproduce import app

    return typer.main.get_command(app)


def _report() -> Any:
    from harness.cli.report import app

    return typer.main.get_command(app)


def _publish() -> Any:
    from harness.cli.publish import app

    return typer.main.get_command(app)


def _history() -> Any:
    from harness.cli.history import app

    return typer.main.get_command(app)


def _tune() -> Any:
    from harness.cli.tune import app

    return typer.main.get_command(app)


def _mcp() -> Any:
    from harness.cli.mcp import app

    return typer.main.get_command(app)


def _optimize() -> Any:
    from harness.cli.optimize import app

    return typer.main.get_command(app)


def _journal() -> Any:
    from harness.cli.journal import app

    return typer.main.get_command(app)


COMMANDS: dict[str, tuple[str, Callable[[], Any]]] = {
    "validate": ("Run every check of the policy that this machine can run; write a bundle.", _validate),
    "plan": ("Show what would run, what cannot run here and why, and how long it takes.", _plan),
    "run": ("Run one stage.", _run),
    "worker": ("Run a plan's checks on a bare GPU machine; leaves raw samples.", _worker),
    "collect": ("Judge a worker's samples and make the bundle.", _collect),
    "doctor": ("Say what this machine can and cannot prove.", _doctor),
    "policy": ("Check policies against their own examples; replay them over history.", _policy),
    "kernels": ("List, test and time fused ops, per cell.", _kernels),
    "evals": ("List, run and compare evals.", _evals),
    "sweep": ("Run and compare sweeps.", _sweep),
    "audit": ("Read compiled kernels that no pack describes.", _audit),
    "faults": ("Plant known faults one by one and see which stage objects.", _faults),
    "bundle": ("Verify, show, compare, pack and sign bundles.", _bundle),
    "gate": ("Decide on bundles: admitted (0), rejected (1), could not judge (2).", _gate),
    "reproduce": ("Run a bundle's plan here: replicated (0), not (1), not comparable (2).", _reproduce),
    "report": ("Render a bundle as HTML, Markdown, JUnit XML or SARIF.", _report),
    "publish": ("Put the verdict on a pull request: a comment and a check run.", _publish),
    "history": ("Ask questions of many bundles: trends, regressions, flaky checks.", _history),
    "tune": ("Search an op's declared choices under its tests; write the tuned table.", _tune),
    "mcp": ("Serve the judge to coding agents over MCP.", _mcp),
    "optimize": ("Run an agent against the judge within budgets; leave the best that was proved.", _optimize),
    "journal": ("Show or export what an agent tried.", _journal),
    "recipe": ("Print server, benchmark and eval commands of a cell.", _recipe),
}


INTERRUPTED = 130
"""Exit code of an interrupted command, as shells have it."""


class LazyGroup(TyperGroup):
    """Shows every command in the help from the table, and imports a command's module when it is called."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # typer's own context
        """Names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]  # as above
        """A stand-in with the command's one-line help."""
        row = COMMANDS.get(cmd_name)
        return None if row is None else TyperCommand(cmd_name, help=row[0])

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]  # as above
        """The real command, imported now."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, COMMANDS[name][1]() if name in COMMANDS else command, rest


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The judge of GPU-kernel pull requests that ask for the fast track.",
    epilog="Exit codes: 0 admitted or passed, 1 rejected, 2 could not judge, 130 interrupted.",
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"fasttrack {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version."
    ),
) -> None:
    pass


def entry(argv: list[str] | None = None) -> None:
    """Console script. Ends the process with the contract's exit code."""
    sys.exit(_exit_code(argv))


def _exit_code(argv: list[str] | None) -> int:
    command: Any = typer.main.get_command(app)
    try:
        result = command.main(args=argv, prog_name="fasttrack", standalone_mode=False)
        if result == INTERRUPTED:  # typer caught it, and says nothing
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except typer.Exit as ended:
        return ended.exit_code
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("interrupted; finished checks are kept, and --resume goes on from there", err=True)
        return INTERRUPTED
    except TyperException as error:
        show = getattr(error, "show", None)
        show() if show is not None else typer.echo(str(error), err=True)
        return 2
    except FasttrackError as error:
        typer.echo(f"fasttrack: {error}", err=True)
        return error.exit_code
    except BrokenPipeError:
        return 2
    except OSError as error:
        if _is_given(error.filename, argv):
            typer.echo(
                f"fasttrack: {error.filename}: {error.strerror}; name another file or folder", err=True
            )
            return 2
        return _own_fault()
    except Exception:  # noqa: BLE001  # the last line of defence: a crash must not read as a rejection
        return _own_fault()


def _own_fault() -> int:
    import traceback

    traceback.print_exc()
    typer.echo(
        "fasttrack broke (a fault of its own, not of the change); please report the lines above", err=True
    )
    return 2


def _is_given(file: object, argv: list[str] | None) -> bool:
    """Whether somebody named this very file or folder."""
    if not isinstance(file, str | os.PathLike):
        return False
    place = os.path.abspath(file)
    words = sys.argv[1:] if argv is None else argv
    return place in {os.path.abspath(word.partition("=")[2] or word) for word in words}
