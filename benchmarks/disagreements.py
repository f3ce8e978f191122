"""What existing scalers make of one ten-line rule: the table in the README, printed.

Each row replays the preset that reproduces the scaler, bugs included.
"""

import buoy

ROWS = {
    "torch GradScaler": ("torch", "init_scale", "growth_interval"),
    "Keras LossScaleOptimizer": ("keras", "initial_scale", "dynamic_growth_steps"),
    "jmp DynamicLossScale": ("jmp", "loss_scale", "period"),
    "flax DynamicScale": ("flax", "scale", "growth_interval"),
    "buoy backoff": ("backoff", "init_scale", "growth_interval"),
}


def scale_after(policy: buoy.Policy, events: str) -> float:
    """Give the scale after a history, 1 = finite."""
    state = policy.init()
    for event in events:
        state = policy.update(state, buoy.Seen(finite=event == "1"))
    return float(state.scale)


def first_growth(policy: buoy.Policy) -> int:
    """Give the clean step at which the scale first moves."""
    start = policy.init().scale
    return next(n for n in range(1, 99) if scale_after(policy, "1" * n) > start)


def main() -> None:
    """Print the table."""
    print(f"{'':26}{'first growth':>14}{'200 overflows':>16}{'clean from top':>18}")
    for label, (name, start, interval) in ROWS.items():
        usual = buoy.policy(name, **{interval: 3})
        top = 2.0**63 if name == "backoff" else 2.0**127
        high = buoy.policy(name, **{start: top, interval: 3})
        low, up = scale_after(usual, "0" * 200), scale_after(high, "1" * 12)
        print(f"{label:26}{f'step {first_growth(usual)}':>14}{low:>16.3g}{up:>18.3g}")


if __name__ == "__main__":
    main()
