"""Every preset reproduces its peer on NumPy, torch and JAX as well, bit for bit."""

import json
from collections import defaultdict

import numpy as np
import pytest

from tests.arrays import BACKENDS
from tests.golden import Golden, load, presets


def by_policy(preset: str) -> list[list[Golden]]:
    """Group the traces that share their parameters: they run side by side."""
    groups: dict[str, list[Golden]] = defaultdict(list)
    for trace in load()[preset]:
        if not trace.refused:
            groups[json.dumps(trace.params, sort_keys=True)].append(trace)
    return list(groups.values())


@pytest.mark.slow
@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("preset", presets())
def test_preset_reproduces_its_peer_on_arrays(preset: str, backend: str) -> None:
    """Side by side on one array, each sequence yields exactly its recorded scales."""
    pytest.importorskip(backend)
    for traces in by_policy(preset):
        length = -(-max(len(trace.seen) for trace in traces) // 64) * 64
        finite = np.ones((length, len(traces)), bool)
        amax = None
        if traces[0].amax_log2 is not None:
            amax = np.zeros(finite.shape)
        for column, trace in enumerate(traces):
            finite[: len(trace.seen), column] = [event == "1" for event in trace.seen]
            if amax is not None:
                amax[: len(trace.seen), column] = trace.amax_log2
        ran = BACKENDS[backend](traces[0].policy(), finite, amax)
        for column, trace in enumerate(traces):
            assert_same(trace, ran.scales[:, column], ran.collapsed[:, column])


def assert_same(trace: Golden, scales: np.ndarray, collapsed: np.ndarray) -> None:
    """Compare one column with its trace, up to where the peer gave up."""
    ends = trace.ends
    expected = np.asarray(trace.scales)
    actual = scales[ends].astype(float)

    np.testing.assert_array_equal(actual, expected, f"{trace.case} {trace.params}")

    flagged = np.flatnonzero(collapsed[: len(trace.seen)])
    if trace.collapsed_at is None:
        assert not flagged.size
    elif trace.go_on:
        assert flagged[-1] == trace.collapsed_at
    else:
        assert flagged[0] == trace.collapsed_at
