"""`fasttrack mcp`: the judge as a server of tools for coding agents."""

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.selectors import PackName, PolicyName

__all__ = ["app"]

app = typer.Typer()


@app.command()
def mcp(
    pack: PackName = "k3_decode",
    policy: PolicyName = "smoke",
    repo: Annotated[Path, typer.Option("--repo", help="Repository with the ops to begin with.")] = Path(),
    workspace: Annotated[Path, typer.Option("--workspace", help="Folder in which the agent edits.")] = Path(
        "workspace"
    ),
    folder: Annotated[
        Path, typer.Option("--folder", help="The judge's own folder; outside the workspace.")
    ] = Path("out/agent"),
    attempts: Annotated[int, typer.Option("--attempts", min=1, help="Attempts for each op.")] = 20,
    http: Annotated[
        bool, typer.Option("--http", help="Streamable HTTP on loopback; default: stdio.")
    ] = False,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="With --http; 0: any free one.")] = 0,
) -> None:
    """Serve the judge over MCP: contracts, tests, benchmarks, audits, evidence, attempts and verdicts.

    With --http, requests need the token of FASTTRACK_MCP_TOKEN, or the one that is printed.
    """
    import anyio

    from harness.agent.judge import Settings
    from harness.agent.server import Judges, http_server, make_server
    from harness.documents import load_policy_set
    from harness.engines.packs import load_pack

    load_policy_set(policy)  # an unknown one is said now, not to the first agent
    settings = Settings(
        pack=load_pack(pack), repo=repo.resolve(), policy=policy, folder=folder.resolve(),
        workspace=workspace.resolve(), attempts=attempts,
    )  # fmt: skip
    server = make_server(Judges(settings))
    if not http:
        anyio.run(server.run_stdio_async)
        return
    token = os.environ.get("FASTTRACK_MCP_TOKEN") or secrets.token_urlsafe(32)
    uvicorn, listening, address = http_server(server, token, port)
    typer.echo(f"{address}\ntoken {token}", err=True)

    async def serve() -> None:
        await uvicorn.serve(sockets=[listening])

    anyio.run(serve)
