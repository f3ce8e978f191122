"""The private names of other libraries that the integrations use are still there.

DeepSpeed's are in test_deepspeed.py, which has its processes.
"""

import inspect

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from lightning.fabric.plugins import MixedPrecision as OfFabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import MixedPrecision as OfTrainer
from lightning.pytorch.plugins.precision import Precision
from tiny import Net, adamw


def test_accelerate_lists_what_it_has_prepared():
    """`_models` and `_optimizers`, and each wrapper holds its optimizer."""
    made = Accelerator(cpu=True)
    assert (made._models, made._optimizers) == ([], [])
    net = Net()
    optimizer = adamw(net)
    model, wrapper = made.prepare(net, optimizer)
    assert made._models == [model]
    assert made._optimizers == [wrapper]
    assert isinstance(wrapper, AcceleratedOptimizer)
    assert wrapper.optimizer is optimizer
    made.free_memory()


def test_accelerate_clips_by_its_own_unscale_gradients():
    """Both ways of clipping call it without an optimizer."""
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        source = inspect.getsource(getattr(Accelerator, name))
        assert "self.unscale_gradients()" in source, name
    assert "self.native_amp" in inspect.getsource(Accelerator)
    assert "scaler_handler" in vars(Accelerator(cpu=True))


@pytest.mark.parametrize("automatic", [True, False])
def test_lightning_counts_steps_where_we_take_them_back(automatic):
    """`global_step` is the sum of the two counters."""

    class Module(LightningModule):
        pass

    module = Module()
    module.automatic_optimization = automatic
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy._lightning_module = module
    loop = trainer.fit_loop.epoch_loop
    if automatic:
        steps = loop.automatic_optimization.optim_progress.optimizer.step
    else:
        steps = loop.manual_optimization.optim_step_progress
    assert trainer.global_step == steps.total.completed == 0
    steps.total.completed += 3
    steps.current.completed += 3
    assert trainer.global_step == 3


def test_lightning_has_the_methods_that_we_override_and_call():
    """With these parameters."""
    expected = {
        "_after_closure": ["self", "model", "optimizer"],
        "clip_grad_by_norm": ["self", "optimizer", "clip_val"],
        "clip_grad_by_value": ["self", "optimizer", "clip_val"],
        "pre_backward": ["self", "tensor", "module"],
        "optimizer_step": ["self", "optimizer", "model", "closure", "kwargs"],
        "teardown": ["self"],
    }
    for name, parameters in expected.items():
        found = inspect.signature(getattr(OfTrainer, name)).parameters
        assert list(found) == parameters, name
    clip = list(inspect.signature(Precision.clip_gradients).parameters)
    assert clip[:2] == ["self", "optimizer"]
    step = inspect.signature(LightningModule.lr_scheduler_step).parameters
    assert list(step) == ["self", "scheduler", "metric"]
    optimizer = torch.optim.SGD(Net().parameters())
    assert LightningOptimizer(optimizer)._optimizer is optimizer


def test_fabric_has_the_methods_that_we_override():
    """With these parameters."""
    expected = {
        "optimizer_step": ["self", "optimizer", "kwargs"],
        "unscale_gradients": ["self", "optimizer"],
        "main_params": ["self", "optimizer"],
        "teardown": ["self"],
    }
    for name, parameters in expected.items():
        found = inspect.signature(getattr(OfFabric, name)).parameters
        assert list(found) == parameters, name
