"""Lightning: Trainer and Fabric end like runs that never saw overflowing batches."""

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from tiny import BAD, GOOD, STEPS, Net, adamw, batch, decay, distance, reference

from buoy.integrations.lightning import (
    FabricMixedPrecision,
    LogScale,
    MixedPrecision,
    metrics,
)
from buoy.torch import GradScaler, OptionError

START = {"init_scale": 2.0**10, "growth_interval": 3}
pytestmark = pytest.mark.filterwarnings("ignore")


class Batches(torch.utils.data.Dataset):
    """The batches, whole."""

    def __init__(self, steps=range(STEPS)):
        self.steps = list(steps)

    def __len__(self):
        return len(self.steps)

    def __getitem__(self, index):
        return batch(self.steps[index])


class Module(LightningModule):
    """Automatic optimization, with a schedule per step."""

    def __init__(self, *, fused=False):
        super().__init__()
        self.net, self.fused, self.seen = Net(), fused, []

    def training_step(self, given, index):
        return self.net(**given)["loss"]

    def configure_optimizers(self):
        optimizer = adamw(self.net, fused=self.fused)
        schedule = {"scheduler": decay(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(self.net.second.bias.grad.item())


def loader(steps=range(STEPS)):
    """Make a loader that takes the batches in order."""
    return torch.utils.data.DataLoader(Batches(steps), batch_size=None)


def trainer(plugin=None, folder=None, **options):
    """Make a Trainer for the CPU, with our plugin."""
    defaults = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "plugins": [plugin or MixedPrecision("16-mixed", "cpu", **START)],
    }
    return Trainer(**{**defaults, **options})


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_weights_lr_and_counters_do_not_see_skipped_steps(fused, max_norm):
    """Automatic optimization; hooks see unscaled gradients."""
    module, made = Module(fused=fused), trainer(gradient_clip_val=max_norm)
    made.fit(module, loader())

    expected, lr = reference(max_norm=max_norm, fused=fused)
    assert distance(module.net, expected) <= 1e-7
    if not (fused and max_norm):
        assert distance(module.net, expected) == 0.0
    assert made.lr_scheduler_configs[0].scheduler.get_last_lr() == [lr]
    assert made.global_step == len(GOOD)
    assert module.net.dtypes == {torch.float16}
    assert len(module.seen) == STEPS
    assert all(abs(grad) < 16 for i, grad in enumerate(module.seen) if i in GOOD)
    assert "lr_scheduler_step" not in vars(module)


def test_an_average_of_weights_does_not_see_skipped_steps():
    """It follows `global_step`."""
    callbacks = [WeightAveraging() for _ in range(2)]
    module, plain = Module(), Module()
    trainer(callbacks=callbacks[:1]).fit(module, loader())
    static = MixedPrecision("16-mixed", "cpu", init_scale=2.0**10)
    trainer(static, callbacks=callbacks[1:]).fit(plain, loader(GOOD))
    ours, theirs = (one._average_model for one in callbacks)
    assert ours.n_averaged == theirs.n_averaged == len(GOOD)
    assert distance(ours, theirs) == 0.0


def test_steps_can_be_counted_as_lightning_does():
    """`count="attempted"`."""
    made = trainer(MixedPrecision("16-mixed", "cpu", count="attempted", **START))
    made.fit(Module(), loader())
    assert made.global_step == STEPS


def test_max_steps_ends_though_every_step_is_skipped():
    """After `patience` skips in a row attempts are counted."""
    plugin = MixedPrecision("16-mixed", "cpu", patience=3, on_stuck=print, **START)
    made = trainer(plugin, max_steps=5, max_epochs=-1)
    made.fit(Module(), loader([3, 3, 3, 3]))
    assert made.global_step == 5


def test_an_unknown_count_is_refused():
    """With the two that there are."""
    with pytest.raises(OptionError, match="'applied' or 'attempted'"):
        MixedPrecision("16-mixed", "cpu", count="all")


class Manual(LightningModule):
    """Two networks, of which the first overflows, in manual optimization."""

    def __init__(self, *, clip=False):
        super().__init__()
        self.automatic_optimization, self.clip = False, clip
        self.nets = torch.nn.ModuleList([Net(0), Net(1)])

    def training_step(self, given, index):
        for which, net in enumerate(self.nets):
            bad = given["bad"] & (which == 0)
            self.manual_backward(net(**{**given, "bad": bad})["loss"])
        for optimizer in self.optimizers():
            if self.clip:
                self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return [adamw(net) for net in self.nets]


@pytest.mark.parametrize("clip", [False, True])
def test_two_optimizers_of_manual_optimization(clip):
    """Both are divided by the scale of their loss."""
    module = Manual(clip=clip)
    made = trainer()
    made.fit(module, loader())
    options = {"max_norm": 0.5 if clip else None, "decayed": False}
    assert distance(module.nets[0], reference(**options)[0]) == 0.0
    every = list(range(STEPS))
    assert distance(module.nets[1], reference(every, seed=1, **options)[0]) == 0.0
    assert made.global_step == len(GOOD) + STEPS


def test_one_optimizer_of_manual_optimization():
    """The module steps its scheduler itself, after an applied step."""

    class Alone(Manual):
        def training_step(self, given, index):
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            optimizer.zero_grad()
            self.manual_backward(self.nets[0](**given)["loss"])
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            if self.trainer.precision_plugin.scaler.last_step.applied:
                scheduler.step()

        def configure_optimizers(self):
            optimizer = adamw(self.nets[0])
            return [optimizer], [decay(optimizer)]

    module, made = Alone(), trainer()
    made.fit(module, loader())
    expected, lr = reference(max_norm=0.5)
    assert distance(module.nets[0], expected) == 0.0
    assert module.lr_schedulers().get_last_lr() == [lr]
    assert made.global_step == len(GOOD)


def test_lbfgs():
    """Which Lightning refuses; an overflow undoes the step."""

    class Searching(Module):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.net.parameters(), lr=0.1)

    module, plain = Searching(), Searching()
    made = trainer()
    made.fit(module, loader())
    other = trainer(MixedPrecision("16-mixed", "cpu", init_scale=2.0**10))
    other.fit(plain, loader(GOOD))
    assert distance(module.net, plain.net) == 0.0
    assert made.global_step == len(GOOD)


class Resumable:
    """The batches, from a loader that knows its place, as Lightning asks for."""

    def __init__(self):
        self.place = 0

    def __len__(self):
        return STEPS

    def __iter__(self):
        while self.place < STEPS:
            self.place += 1
            yield batch(self.place - 1)
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


@pytest.mark.parametrize("after", [BAD[0], 4])
def test_a_run_resumes_exactly_within_an_epoch(after, tmp_path):
    """From a checkpoint right after a skipped step, and from one after the next."""

    class Save(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, given, index):
            if index == after:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    module, whole = Module(), Module()
    straight, resumed = trainer(callbacks=[Save()]), trainer()
    straight.fit(whole, Resumable())
    resumed.fit(module, Resumable(), ckpt_path=tmp_path / "middle.ckpt")
    assert len(module.seen) == STEPS - after - 1
    assert distance(module.net, whole.net) == 0.0
    assert resumed.global_step == straight.global_step == len(GOOD)
    rates = [one.lr_scheduler_configs[0].scheduler for one in (resumed, straight)]
    assert rates[0].get_last_lr() == rates[1].get_last_lr()
    states = [one.precision_plugin.state_dict() for one in (resumed, straight)]
    assert states[0] == states[1]


def test_a_run_resumes_exactly(tmp_path):
    """From a checkpoint between two epochs, with any loader."""
    half = trainer(folder=tmp_path)
    half.fit(Module(), loader())
    half.save_checkpoint(tmp_path / "half.ckpt")
    module, whole = Module(), Module()
    resumed, straight = (trainer(folder=tmp_path, max_epochs=2) for _ in range(2))
    resumed.fit(module, loader(), ckpt_path=tmp_path / "half.ckpt")
    straight.fit(whole, loader())
    assert distance(module.net, whole.net) == 0.0
    assert resumed.global_step == straight.global_step
    states = [one.precision_plugin.state_dict() for one in (resumed, straight)]
    assert states[0] == states[1]


def test_the_callback_logs_the_same_names_as_everywhere(tmp_path):
    """In the logger's file."""
    made = trainer(
        logger=CSVLogger(tmp_path), callbacks=[LogScale()], log_every_n_steps=1
    )
    made.fit(Module(), loader())
    assert made.logged_metrics["buoy/skipped"] == len(BAD)
    assert made.logged_metrics.keys() == {"buoy/scale", "buoy/skipped", "buoy/norm"}


def test_bf16_turns_it_off():
    """The same plugin and callback, without an error."""
    plugin = MixedPrecision("bf16-mixed", "cpu", policy="headroom", **START)
    module = Module()
    trainer(plugin, callbacks=[LogScale()]).fit(module, loader([0, 1]))
    assert plugin.scaler is None
    assert module.net.dtypes == {torch.bfloat16}


# -- Fabric ----------------------------------------------------------------------------


def run_fabric(
    plugin, steps, *, fused=False, max_norm=None, seeds=(0,), bad=True, save=None
):
    """Run Fabric's documented loop; of several networks only the first overflows."""
    fabric = Fabric(accelerator="cpu", plugins=[plugin])
    nets = [Net(seed) for seed in seeds]
    pairs = [fabric.setup(net, adamw(net, fused=fused)) for net in nets]
    schedulers = [decay(optimizer.optimizer) for _, optimizer in pairs]
    parts = {str(i): part for i, part in enumerate([*sum(pairs, ()), *schedulers])}
    for step in steps:
        if save is not None and step == 5:
            if save.exists():
                plugin.load_state_dict(fabric.load(save, parts)["plugin"])
            else:
                fabric.save(save, {**parts, "plugin": plugin.state_dict()})
        for index, (model, optimizer) in enumerate(pairs):
            given = batch(step)
            given["bad"] &= bad and index == 0
            optimizer.zero_grad()
            fabric.backward(model(**given)["loss"])
        for (model, optimizer), scheduler in zip(pairs, schedulers, strict=True):
            if max_norm is not None:
                fabric.clip_gradients(model, optimizer, max_norm=max_norm)
            optimizer.step()
            last = plugin.scaler and plugin.scaler.last_step_of(optimizer.optimizer)
            if last is None or last.applied:
                scheduler.step()
    rates = [scheduler.get_last_lr()[0] for scheduler in schedulers]
    return (nets[0], rates[0]) if len(nets) == 1 else (nets, rates)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_fabric(fused, max_norm):
    """Inputs are FP16 here, so the reference is Fabric without the bad batches."""
    options = {"fused": fused, "max_norm": max_norm}
    plugins = [FabricMixedPrecision("16-mixed", "cpu", **START) for _ in range(2)]
    net, lr = run_fabric(plugins[0], range(STEPS), **options)
    expected, other = run_fabric(plugins[1], GOOD, **options)
    assert distance(net, expected) == 0.0
    assert lr == other
    assert net.dtypes == {torch.float16}
    assert isinstance(plugins[0].scaler, GradScaler)


def fabric_plugin():
    """Make a plugin for the CPU."""
    return FabricMixedPrecision("16-mixed", "cpu", **START)


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_fabric_with_two_optimizers(max_norm):
    """Both are divided by the scale of their loss; the second never overflows."""
    every, options = range(STEPS), {"max_norm": max_norm}
    nets, rates = run_fabric(fabric_plugin(), every, seeds=(0, 1), **options)
    first, lr = run_fabric(fabric_plugin(), GOOD, **options)
    second, other = run_fabric(fabric_plugin(), every, seeds=(1,), bad=False, **options)
    assert [distance(nets[0], first), distance(nets[1], second)] == [0.0, 0.0]
    assert rates == [lr, other]


def test_a_run_of_fabric_resumes_exactly(tmp_path):
    """The plugin's state is saved with the model; here after an overflow."""
    plugins = [fabric_plugin() for _ in range(2)]
    save = tmp_path / "state.ckpt"
    whole, lr = run_fabric(plugins[0], range(STEPS), save=save)
    net, other = run_fabric(plugins[1], range(5, STEPS), save=save)
    assert distance(net, whole) == 0.0
    assert lr == other
    assert plugins[0].state_dict() == plugins[1].state_dict()


def test_fabric_with_lbfgs():
    """An overflow undoes the step."""

    def train(steps):
        plugin = fabric_plugin()
        fabric = Fabric(accelerator="cpu", plugins=[plugin])
        net = Net()
        search = torch.optim.LBFGS(net.parameters(), lr=0.1)
        model, optimizer = fabric.setup(net, search)
        for step in steps:

            def closure(step=step):
                optimizer.zero_grad()
                loss = model(**batch(step))["loss"]
                fabric.backward(loss)
                return loss

            optimizer.step(closure=closure)
        return net, plugin.scaler

    (net, scaler), (plain, other) = train(range(STEPS)), train(GOOD)
    assert distance(net, plain) == 0.0
    assert distance(net, Net()) > 0.1
    skipped = [metrics(one)["buoy/skipped"] for one in (scaler, other)]
    assert skipped[0] - skipped[1] == len(BAD)  # a search can overflow by itself


def test_what_fabric_logs_has_the_same_names():
    """`fabric.log_dict(metrics(plugin.scaler))`."""
    plugin = fabric_plugin()
    run_fabric(plugin, range(5), max_norm=0.5)
    found = metrics(plugin.scaler)
    assert found.keys() == {"buoy/scale", "buoy/skipped", "buoy/norm"}
    assert found["buoy/skipped"] == 1.0


def test_fabric_in_bf16_turns_it_off():
    """Without an error."""
    plugin = FabricMixedPrecision("bf16-mixed", "cpu", **START)
    net, _ = run_fabric(plugin, [0, 1], max_norm=0.5)
    assert net.dtypes == {torch.bfloat16}
