"""`buoy.torch.install`, and `ShardedGradScaler`: torch's names and arguments."""

import abc
import inspect
import pickle
import sys
import types

import pytest
import torch
from torch.distributed.fsdp import sharded_grad_scaler

from buoy.torch import GradScaler, ShardedGradScaler, install

TORCHS = torch.amp.GradScaler
SHARDED = sharded_grad_scaler.ShardedGradScaler


def test_the_policy_and_the_options_are_those_given():
    """The library's own numbers belong to torch's rule."""
    with install(policy="headroom", device="cpu") as installed:
        scaler = torch.amp.GradScaler("cuda", init_scale=4.0, growth_interval=7)
    assert isinstance(scaler, GradScaler)
    assert type(scaler.policy).__name__ == "Headroom"
    assert scaler._device == "cpu"
    assert installed.scalers == [scaler]


def test_without_a_policy_the_librarys_numbers_count():
    """Unless they are given as options."""
    with install(backoff_factor=0.25):
        scaler = torch.amp.GradScaler("cpu", 8.0, growth_interval=7)
    assert scaler.get_scale() == 8.0
    assert scaler.get_growth_interval() == 7
    assert scaler.get_backoff_factor() == 0.25


def test_a_disabled_scaler_stays_disabled():
    """A library makes one for bf16, so that its loop need not ask."""
    with install(policy="headroom"):
        scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert not scaler.is_enabled()
    assert scaler.scale(torch.ones(())) == 1.0


def test_an_installed_scaler_is_managed_unless_said_otherwise():
    """The library calls `update` as often as it wants."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with install():
        scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    scaler.update()
    assert scaler.last_step.applied


def test_without_host_reads_it_is_not_managed():
    """`managed` reads the device, `sync="never"` does not."""
    with install(sync="never"):
        scaler = torch.amp.GradScaler("cpu")
    assert not scaler._options.managed


def test_undo_restores_every_name_also_those_imported_since(monkeypatch):
    """A module that was imported in between holds torch's own again."""
    installed = install()
    late = types.ModuleType("late")
    late.Scaler = torch.amp.GradScaler
    monkeypatch.setitem(sys.modules, "late", late)
    installed.undo()
    installed.undo()
    assert late.Scaler is torch.amp.GradScaler is TORCHS
    assert sharded_grad_scaler.ShardedGradScaler is SHARDED


def test_installations_nest():
    """The inner one counts, and leaves the outer one as it was."""
    with install(growth_interval=1):
        outer = torch.amp.GradScaler
        with install(growth_interval=2):
            inner = torch.amp.GradScaler("cpu")
        assert torch.amp.GradScaler is outer
        assert outer("cpu").get_growth_interval() == 1
    assert inner.get_growth_interval() == 2
    assert torch.amp.GradScaler is TORCHS


def test_several_scalers_are_recorded_in_files_of_their_own(tmp_path):
    """The later ones have a number in their names; the fifth is not recorded."""
    with install(trace=tmp_path / "run.buoy") as installed:
        for _ in range(5):
            torch.amp.GradScaler("cpu")
    installed.close()
    names = {path.name for path in installed.traces}
    assert names == {"run.buoy", "run-2.buoy", "run-3.buoy", "run-4.buoy"}
    assert installed.scalers[4].trace is None


def test_the_deprecated_class_warns_as_torchs_does():
    """Which has no `device`."""
    with install(), pytest.warns(FutureWarning, match=r"torch\.amp\.GradScaler\('cpu'"):
        scaler = torch.cpu.amp.GradScaler(16.0)
    assert scaler.get_scale() == 16.0


def test_a_scaler_can_be_pickled_while_installed():
    """Its class is found by torch's name."""
    with install():
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        copied = pickle.loads(pickle.dumps(scaler))  # noqa: S301 - our own
    assert copied.get_scale() == 8.0


def test_the_sharded_scaler_has_torchs_signature():
    """Names, order and defaults; without `process_group` all ranks agree in both."""
    theirs = list(inspect.signature(SHARDED).parameters.values())
    ours = list(inspect.signature(ShardedGradScaler).parameters.values())
    assert [p.name for p in theirs] == [p.name for p in ours[: len(theirs)]]
    before = len(theirs) - 1
    assert [p.default for p in theirs[:before]] == [p.default for p in ours[:before]]


def test_the_sharded_scaler_is_installed_with_its_order_of_arguments():
    """The third is `backoff_factor`."""
    with install():
        scaler = sharded_grad_scaler.ShardedGradScaler("cpu", 8.0, 0.25, 4.0)
        assert isinstance(scaler, torch.amp.GradScaler)
    assert isinstance(scaler, ShardedGradScaler)
    assert (scaler.get_backoff_factor(), scaler.get_growth_factor()) == (0.25, 4.0)
    assert ShardedGradScaler("cpu", 8.0, 0.25).get_backoff_factor() == 0.25


def test_scalers_that_were_created_elsewhere_are_instances_of_torchs_class():
    """Libraries check what they are given; subclasses of theirs stay as narrow."""
    before, sharded, own = TORCHS("cpu"), SHARDED("cpu"), GradScaler("cpu")
    with install():

        class Theirs(torch.amp.GradScaler, abc.ABC):
            pass

        for scaler in (before, sharded, own, torch.amp.GradScaler("cpu")):
            assert isinstance(scaler, torch.amp.GradScaler)
            assert not isinstance(scaler, Theirs)
        assert isinstance(sharded, sharded_grad_scaler.ShardedGradScaler)
        assert not isinstance(own, sharded_grad_scaler.ShardedGradScaler)
        assert isinstance(Theirs("cpu"), (torch.amp.GradScaler, Theirs))
        assert not isinstance(3, torch.amp.GradScaler)


def test_what_there_is_to_log_has_the_names_of_the_integrations():
    """Of the last scaler; a skipped step has no norm, and a disabled scaler nothing."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with install(init_scale=8.0) as installed:
        scaler = torch.amp.GradScaler("cpu")
        assert installed.metrics() == {}
        logs = []
        for value in (2.0, torch.inf, 2.0):
            optimizer.zero_grad()
            scaler.scale((weight * value).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            logs.append(installed.metrics())
        norm = pytest.approx(2.0 * 3**0.5)
        assert logs == [
            {"buoy/scale": 8.0, "buoy/skipped": 0.0, "buoy/norm": norm},
            {"buoy/scale": 8.0, "buoy/skipped": 1.0},
            {"buoy/scale": 4.0, "buoy/skipped": 1.0, "buoy/norm": norm},
        ]
        optimizer.zero_grad()
        scaler.scale((weight * 2.0).sum()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert installed.metrics() == {"buoy/scale": 4.0, "buoy/skipped": 1.0}
        torch.amp.GradScaler("cpu", enabled=False)
        assert installed.metrics() == {}
