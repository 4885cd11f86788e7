"""Make a plan again from the same claim, policy, change, machine and nonce, with the planner that is here.

Whatever harness and pack a plan names, this one plans: a gate that took a plan's word for which code made it
would leave the asking to the asked.
"""

from functools import partial

from harness.documents import load_claim
from harness.domain.errors import FasttrackError
from harness.domain.pack import Pack
from harness.domain.plan import Plan
from harness.engines.packs import files_digest, harness_digest, load_pack, pack_digest
from harness.evidence.verify import Replanned
from harness.planner import CodeDigests, make_plan, request_again
from harness.repository import GitTree

__all__ = ["other_pack", "replan"]


def replan(plan: Plan) -> Replanned:
    """What this harness and the pack installed here plan for the stages of `plan`."""
    here, pack_here = harness_digest(), None
    try:
        pack = load_pack(plan.pack)
        pack_here, claim = pack_digest(pack), load_claim(pack.claim_file())
        request = request_again(plan, pack, plan.machine)
        stages = tuple(dict.fromkeys(check.stage for check in plan.checks))
        made = make_plan(request, CodeDigests(here, pack_here), plan.nonce, stages)
    except (FasttrackError, ImportError) as error:
        return Replanned(here, pack_here, None, str(error))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # A claim, policy or machine of a forged plan may be one that no planner of ours was written for.
        return Replanned(
            here, pack_here, None, f"no plan can be made of it ({type(error).__name__}: {error})"
        )
    return Replanned(here, pack_here, made.checks, claim=claim)


def other_pack(pack: Pack, digest: str, tree: GitTree) -> str:
    """The digest of the pack's files at the head of `tree`, where it is not `digest`; empty where it is, or
    where the repository does not hold the pack.
    """
    prefix = pack.repository_prefix
    paths = [path for path in tree.paths("head") if path.startswith(prefix)]
    at_head = files_digest({path.removeprefix(prefix): partial(_content, tree, path) for path in paths})
    return "" if not paths or at_head == digest else at_head


def _content(tree: GitTree, path: str) -> bytes:
    return tree.read("head", path) or b""
