"""Print what a look at the loss saves: steps skipped by policies, alone and wrapped.

    python benchmarks/loss_ahead.py [number of traces]

The recorded trainings in the regimes of `python -m benchmarks.headroom.compare`, where
the loss moves with the gradients, and where it does not.  A level that drifts or jumps
for good moves the loss, too.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import buoy
from benchmarks.headroom import split
from benchmarks.headroom.lanes import grid

POLICIES = ("headroom", "lognormal", "backoff")


def row(name: str, traces: tuple[str, ...]) -> str:
    """Return one line of the table."""
    ahead = buoy.LossAhead(name)
    runs = ((buoy.policy(name), "unseen"), (ahead, "moves"), (ahead, "blind"))
    cells = []
    for policy, loss in runs:
        skips, lost, _ = grid(policy, traces, loss).mean((0, 1))
        cells.append(f"{skips:.3f} / {lost:.4f}")
    return f"| `{name}` | {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else len(split.ALL)
    traces = tuple(split.ALL[:count])
    print(f"{len(traces)} traces: steps skipped per 1000 / % of gradients lost\n")
    print("| policy | alone | with LossAhead | where the loss does not move |")
    print("|---|--:|--:|--:|")
    for name in POLICIES:
        print(row(name, traces))


if __name__ == "__main__":
    main()
