"""Accelerate: the loop ends like one that never saw the batches that overflow."""

from itertools import pairwise

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import GradScalerKwargs
from tiny import BAD, GOOD, STEPS, Net, adamw, batch, decay, distance, reference

from buoy.integrations import accelerate as ours
from buoy.torch import OptionError

START = {"init_scale": 2.0**10, "growth_interval": 3}


def _reset():
    """Accelerate keeps its state in singletons."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture(autouse=True)
def _fresh():
    _reset()


def accelerator(precision="fp16", **options):
    """Make one for the CPU, with a scaler of ours."""
    made = Accelerator(mixed_precision=precision, cpu=True, **options)
    return made, ours.use(made, **START)


def train(made, model, optimizer, scheduler, steps=range(STEPS), max_norm=None):
    """Run the documented loop; return which steps Accelerate took for skipped."""
    skipped = []
    for step in steps:
        with made.accumulate(model):
            loss = model(**batch(step))["loss"]
            made.backward(loss)
            if made.sync_gradients and max_norm is not None:
                made.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if made.sync_gradients and made.optimizer_step_was_skipped:
                skipped.append(step)
    return skipped


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_weights_lr_and_counters_do_not_see_skipped_steps(fused, max_norm):
    """Clipped or not, fused or not."""
    made, scaler = accelerator()
    net = Net()
    model, optimizer = made.prepare(net, adamw(net, fused=fused))
    scheduler = made.prepare(decay(optimizer))
    skipped = train(made, model, optimizer, scheduler, max_norm=max_norm)

    expected, lr = reference(max_norm=max_norm, fused=fused)
    # Fused, the clip factor is part of the division by the scale: one rounding less.
    assert distance(net, expected) <= (1e-7 if fused and max_norm else 0.0)
    assert scheduler.get_last_lr() == [lr]
    assert skipped == list(BAD)
    assert net.dtypes == {torch.float16}
    assert {float(s["step"]) for s in optimizer.state.values()} == {len(GOOD)}
    found = ours.metrics(scaler)
    assert found.keys() == {"buoy/scale", "buoy/skipped", "buoy/norm"}
    assert found["buoy/skipped"] == len(BAD)


def test_accumulated_batches_are_dropped_together():
    """Windows of two: 2, 3 and 6, 7 overflow."""
    made, _ = accelerator(gradient_accumulation_steps=2)
    net = Net()
    model, optimizer = made.prepare(net, adamw(net))
    scheduler = made.prepare(decay(optimizer))
    train(made, model, optimizer, scheduler)

    expected, lr = reference([0, 1, 4, 5, 8, 9, 10, 11], accumulate=2)
    assert distance(net, expected) == 0.0
    assert scheduler.get_last_lr() == [lr]


@pytest.mark.parametrize("clip", ["none", "after each", "after both"])
def test_two_optimizers_are_divided_by_one_scale(clip):
    """Accelerate calls `update` after each; the second model never overflows."""
    made, scaler = accelerator()
    nets = Net(0), Net(1)
    pairs = [made.prepare(net, adamw(net)) for net in nets]
    scales = []
    for step in range(STEPS):
        for index, (model, _) in enumerate(pairs):
            given = batch(step)
            given["bad"] &= index == 0
            made.backward(model(**given)["loss"])
        if clip == "after both":
            for model, _ in pairs:
                made.clip_grad_norm_(model.parameters(), 0.5)
        for model, optimizer in pairs:
            if clip == "after each":
                made.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        scales.append(scaler.get_scale())

    max_norm = None if clip == "none" else 0.5
    first, _ = reference(max_norm=max_norm, decayed=False)
    every = list(range(STEPS))
    second, _ = reference(every, max_norm=max_norm, decayed=False, seed=1)
    assert distance(nets[0], first) == 0.0
    assert distance(nets[1], second) == 0.0
    assert scales[BAD[0]] == scales[BAD[0] - 1] / 2


def test_one_overflow_of_a_gan_backs_off_once():
    """Each network has a loss of its own; clipping one leaves the other alone."""
    made, scaler = accelerator()
    nets = Net(0), Net(1)
    pairs = [made.prepare(net, adamw(net)) for net in nets]
    scales = []
    for step in range(4, STEPS):
        for index, (model, optimizer) in enumerate(pairs):
            given = batch(step)
            given["bad"] &= index == 1
            optimizer.zero_grad()
            made.backward(model(**given)["loss"])
            made.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scales.append(scaler.get_scale())
    assert sum(a > b for a, b in pairwise(scales)) == 1


def test_a_run_resumes_exactly(tmp_path):
    """`save_state` after an overflow, `load_state` in a new run."""

    def begin():
        _reset()
        made, scaler = accelerator()
        net = Net()
        model, optimizer = made.prepare(net, adamw(net))
        return made, scaler, net, (model, optimizer, made.prepare(decay(optimizer)))

    made, scaler, whole, parts = begin()
    train(made, *parts, steps=range(5))
    made.save_state(tmp_path)
    train(made, *parts, steps=range(5, STEPS))
    end = scaler.state_dict()
    made, scaler, net, parts = begin()
    made.load_state(tmp_path)
    train(made, *parts, steps=range(5, STEPS))
    assert distance(net, whole) == 0.0
    assert scaler.state_dict() == end


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_another_precision_turns_it_off(precision):
    """Without an error, and with nothing changed."""
    made, scaler = accelerator(precision)
    assert scaler is None
    assert made.scaler is None
    net = Net()
    model, optimizer = made.prepare(net, adamw(net))
    assert train(made, model, optimizer, made.prepare(decay(optimizer)), [0, 1]) == []


def test_accelerates_own_numbers_count_unless_a_policy_is_given():
    """`GradScalerKwargs` are parameters of torch's rule."""
    handler = GradScalerKwargs(init_scale=4.0, growth_interval=9)
    made = Accelerator(mixed_precision="fp16", cpu=True, kwargs_handlers=[handler])
    scaler = ours.use(made)
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (4.0, 9)
    policy = ours.use(made, policy="headroom").policy
    assert type(policy).__name__ == "Headroom"


def test_a_scaler_given_after_prepare_is_refused():
    """What is prepared has kept the other scaler."""
    made = Accelerator(mixed_precision="fp16", cpu=True)
    made.prepare(Net())
    with pytest.raises(OptionError, match="before `prepare`"):
        ours.use(made)


def test_values_are_clipped_after_unscaling():
    """By the threshold that was given, not by a multiple of it."""
    made, _ = accelerator()
    net = Net()
    model, optimizer = made.prepare(net, adamw(net))
    made.backward(model(**batch(0))["loss"])
    made.clip_grad_value_(model.parameters(), 1e-3)
    largest = max(param.grad.abs().max().item() for param in net.parameters())
    assert largest == pytest.approx(1e-3)
    optimizer.step()


def test_an_optimizer_with_a_closure_gets_unscaled_gradients():
    """LBFGS evaluates the model itself; an overflow undoes the step."""
    made, scaler = accelerator()
    net, alone = Net(), Net()
    model, optimizer = made.prepare(net, torch.optim.LBFGS(net.parameters(), lr=0.1))
    plain = torch.optim.LBFGS(alone.parameters(), lr=0.1)

    def closure_of(step, used, holder, scaled):
        def closure():
            holder.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = used(**batch(step))["loss"]
            if scaled:
                made.backward(loss)
            else:
                (loss * 2.0**10).backward()
                for param in used.parameters():
                    param.grad /= 2.0**10
            return loss

        return closure

    for step in (0, 3, 1):
        optimizer.step(closure_of(step, model, optimizer, scaled=True))
        if step != 3:
            plain.step(closure_of(step, alone, plain, scaled=False))
    assert distance(net, alone) == 0.0
    assert scaler.get_scale() == 2.0**9


def test_an_adapter_in_fp32_trains_over_a_base_in_fp16():
    """PEFT: only the adapters have gradients, and they are FP32."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["first"])

    def adapted():
        torch.manual_seed(0)
        model = peft.get_peft_model(Net(), config)
        for name, param in model.named_parameters():
            if "lora" not in name:
                param.data = param.data.half()
        return model

    made, _ = accelerator()
    net = adapted()
    trained = [param for param in net.parameters() if param.requires_grad]
    model, optimizer = made.prepare(net, torch.optim.AdamW(trained, lr=0.05))
    skipped = train(made, model, optimizer, made.prepare(decay(optimizer)))
    assert skipped == list(BAD)

    alone = adapted()
    held = [param for param in alone.parameters() if param.requires_grad]
    plain = torch.optim.AdamW(held, lr=0.05)
    scheduler = decay(plain)
    for step in GOOD:
        plain.zero_grad()
        with torch.autocast("cpu", torch.float16):
            (alone(**batch(step))["loss"] * 2.0**10).backward()
        for param in held:
            param.grad /= 2.0**10
        plain.step()
        scheduler.step()
    assert distance(net, alone) == 0.0


def test_bitsandbytes_optimizers_are_skipped_and_stepped_as_others():
    """Their state is quantised; on a CPU they step in FP32 blocks."""
    import bitsandbytes

    nets = Net(), Net()
    made, _ = accelerator()
    adamw_of = bitsandbytes.optim.AdamW
    optimizers = [adamw_of(net.parameters(), lr=0.05) for net in nets]
    model, optimizer = made.prepare(nets[0], optimizers[0])
    skipped = train(made, model, optimizer, made.prepare(decay(optimizer)))
    assert skipped == list(BAD)
    scheduler = decay(optimizers[1])
    for step in GOOD:
        optimizers[1].zero_grad()
        with torch.autocast("cpu", torch.float16):
            (nets[1](**batch(step))["loss"] * 2.0**10).backward()
        for param in nets[1].parameters():
            param.grad /= 2.0**10
        optimizers[1].step()
        scheduler.step()
    assert distance(*nets) == 0.0
