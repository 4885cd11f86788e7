"""Widens every narrow margin by about the same amount, in the head alone: `python -m k3_decode.canary.widen
IN OUT`.

The logit of each distractor loses `share` of the logit of the token it stands behind. Hidden states, and
with them what a fault does to them, stay as trained; a token that led by 0.5 leads by 0.5 + share x (its
logit less that of the token before it in its class). For weights whose long chains fail at the last few
narrow tokens, when there is no time to train on.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from k3_decode.canary import vocabulary
from k3_decode.canary.export import read_safetensors, write_safetensors

__all__ = ["main", "widened"]

_HEAD = "lm_head.weight"


def widened(head: Tensor, share: float) -> Tensor:
    """A head [vocab, hidden] whose distractors stand further back."""
    changed = head.float().clone()
    for right, other in enumerate(vocabulary.DISTRACTOR.tolist()):
        if other != right:
            changed[other] = head[other].float() - share * head[right].float()
    return changed.to(head.dtype)


def main(arguments: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m k3_decode.canary.widen", description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--share", type=float, default=0.035)
    args = parser.parse_args(arguments)
    with torch.no_grad():
        tensors = read_safetensors(args.source)
        write_safetensors(args.target, {**tensors, _HEAD: widened(tensors[_HEAD], args.share)})


if __name__ == "__main__":
    main()
