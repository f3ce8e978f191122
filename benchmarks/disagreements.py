"""Print what existing scalers make of one ten-line rule.

    python benchmarks/disagreements.py         # the table of docs/why/comparison.md
    python benchmarks/disagreements.py --all   # every preset: docs/policies/presets.md

Each row replays the preset that reproduces the scaler, bugs included.
"""

import argparse
import math

import buoy
from buoy._core.policies.registry import listed

ROWS = {
    "torch GradScaler": ("torch", "init_scale", "growth_interval"),
    "Keras LossScaleOptimizer": ("keras", "initial_scale", "dynamic_growth_steps"),
    "jmp DynamicLossScale": ("jmp", "loss_scale", "period"),
    "flax DynamicScale": ("flax", "scale", "growth_interval"),
    "buoy backoff": ("backoff", "init_scale", "growth_interval"),
}


def scale_after(policy: buoy.Policy, events: str) -> float:
    """Return the scale after a history, 1 = finite."""
    state = policy.init()
    for event in events:
        state = policy.update(state, buoy.Seen(finite=event == "1"))
    return float(state.scale)


def first_growth(policy: buoy.Policy) -> int:
    """Return the clean step at which the scale first moves."""
    start = policy.init().scale
    return next(n for n in range(1, 99) if scale_after(policy, "1" * n) > start)


def power(scale: float) -> str:
    """Write a scale as a power of two where it is one."""
    if scale == 1.0:
        return "1"
    if scale > 0 and math.log2(scale).is_integer():
        return f"2^{math.log2(scale):.0f}"
    return f"{scale:.3g}"


def after_overflows(policy: buoy.Policy, count: int) -> str:
    """Return the scale after some overflows in a row."""
    try:
        return power(scale_after(policy, "0" * count))
    except buoy.ScaleCollapsedError:
        return "gives up"


def growth(policy: buoy.Policy) -> str:
    """Return the clean step at which the scale first rises."""
    state = policy.init()
    first = state.scale
    clean = buoy.Seen(finite=True, amax_log2=0.0)
    for step in range(1, 2500):
        state = policy.update(state, clean)
        if state.scale > first:
            return str(step)
    return "at its ceiling"


def rows() -> list[str]:
    """List the rows of the table of all presets, in Markdown."""
    found = []
    for held in listed():
        if held.source.startswith("buoy."):
            continue
        policy = buoy.policy(held.name)
        cells = [
            f"`{held.name}`",
            held.source,
            power(policy.init().scale),
            growth(policy),
            *(after_overflows(policy, count) for count in (1, 2, 2000)),
        ]
        found.append(f"| {' | '.join(cells)} |")
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every preset")
    if parser.parse_args().all:
        print("\n".join(rows()))
        return
    print(f"{'':26}{'first growth':>14}{'200 overflows':>16}{'clean from top':>18}")
    for label, (name, start, interval) in ROWS.items():
        usual = buoy.policy(name, **{interval: 3})
        top = 2.0**63 if name == "backoff" else 2.0**127
        high = buoy.policy(name, **{start: top, interval: 3})
        low = scale_after(usual, "0" * 200)
        up = scale_after(high, "1" * 12)
        print(f"{label:26}{f'step {first_growth(usual)}':>14}{low:>16.3g}{up:>18.3g}")


if __name__ == "__main__":
    main()
