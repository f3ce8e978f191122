"""LBFGS, SAM and others with a closure see what they would see in FP32."""

import math

import pytest
import torch
from nets import OPTIMIZERS, batch, loss_of, net

from buoy.torch import (
    CallOrderError,
    DeviceModeError,
    GradScaler,
    MasterWeights,
)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation around another optimizer (Foret et al. 2021)."""

    def __init__(self, params, base, rho=0.05, *, first_inside=True):
        super().__init__(params, {"rho": rho})
        self.base = base(self.param_groups)
        self.param_groups = self.base.param_groups
        self.first_inside = first_inside

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        loss = closure() if self.first_inside else None
        held = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            self.state[p]["old"] = p.detach().clone()
            p.add_(p.grad, alpha=0.05 / (norm.item() + 1e-12))
        self.zero_grad()
        again = closure()
        for p in held:
            p.copy_(self.state[p]["old"])
        self.base.step()
        return again if loss is None else loss


KINDS = {
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=4, history_size=3),
    "lbfgs wolfe": lambda p: torch.optim.LBFGS(
        p, max_iter=4, history_size=3, line_search_fn="strong_wolfe"
    ),
    "sam": lambda p: SAM(p, lambda g: torch.optim.SGD(g, lr=0.05, momentum=0.9)),
    "sam adam": lambda p: SAM(p, lambda g: torch.optim.Adam(g, lr=0.01)),
    "adamw": OPTIMIZERS["adamw"],
    "fused adamw": OPTIMIZERS["fused adamw"],
    "fused momentum": OPTIMIZERS["fused momentum"],
}
EVERY = pytest.mark.parametrize("kind", list(KINDS))
FORMS = pytest.mark.parametrize("form", ["returns", "scales"])


def weights(model):
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def closure_for(scaler, model, optimizer, step, form, spoiled=None):
    """Write a closure in one of the two forms; spoil its n-th evaluation."""
    calls = []

    def closure():
        calls.append(step)
        bad = spoiled is not None and len(calls) == spoiled
        loss = loss_of(model, step)
        loss = loss * torch.tensor(math.inf if bad else 1.0)
        if form == "scales":
            optimizer.zero_grad()
            scaler.scale(loss).backward()
        return loss

    closure.calls = calls
    return closure


def plainly(kind, steps):
    """Train without a scaler."""
    model = net()
    optimizer = KINDS[kind](model.parameters())
    for step in steps:

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        optimizer.step(closure)
    return weights(model), optimizer


@EVERY
@FORMS
@pytest.mark.parametrize("positional", [True, False])
def test_a_trajectory_is_that_of_fp32(kind, form, positional):
    """Bit for bit where the arithmetic is exact: FP32, a scale that is a power of 2."""
    model = net()
    optimizer = KINDS[kind](model.parameters())
    scaler = GradScaler("cpu")
    for step in range(6):
        closure = closure_for(scaler, model, optimizer, step, form)
        if positional:
            scaler.step(optimizer, closure)
        else:
            scaler.step(optimizer, closure=closure)
        scaler.update()
        assert scaler.last_step.applied
        assert closure.calls
    expected, _ = plainly(kind, range(6))

    assert torch.equal(expected, weights(model))


@pytest.mark.parametrize("kind", ["lbfgs", "lbfgs wolfe", "sam", "sam adam"])
@pytest.mark.parametrize("policy", [None, "headroom"])
def test_in_fp16_it_ends_where_fp32_ends(kind, policy):
    """Under autocast, with a first scale that overflows."""
    x, y = batch(0)

    def run(scaler, dtype):
        model = net()
        optimizer = KINDS[kind](model.parameters())
        applied = 0
        while applied < 12:

            def closure():
                enabled = dtype is torch.float16
                with torch.autocast("cpu", torch.float16, enabled=enabled):
                    return torch.nn.functional.mse_loss(model(x), y)

            scaler.step(optimizer, closure)
            scaler.update()
            applied += scaler.last_step.applied
        return closure().item()

    scaler = GradScaler("cpu", policy=policy, init_scale=2.0**20)
    half, wide = run(scaler, torch.float16), run(GradScaler("cpu"), torch.float32)
    assert abs(half - wide) <= 0.03 * wide + 0.02
    if policy is None:
        assert scaler.get_scale() < 2.0**20


@EVERY
@FORMS
@pytest.mark.parametrize("spoiled", [1, 2])
def test_an_overflow_in_any_evaluation_restores_the_starting_point(kind, form, spoiled):
    """The run ends like one that never saw that batch; state, counters and all."""
    model = net()
    optimizer = KINDS[kind](model.parameters())
    scaler = GradScaler("cpu", model=model)
    skipped = 0
    for step in range(6):
        before = weights(model)
        bad = spoiled if step in {0, 3} else None
        closure = closure_for(scaler, model, optimizer, step, form, bad)
        result = scaler.step(optimizer, closure)
        if bad and len(closure.calls) >= bad:
            skipped += 1
            assert result is None
            assert torch.equal(before, weights(model))
            assert len(closure.calls) == bad
            assert scaler.last_step.verdict == "forward_nonfinite"
            assert "0.weight" in scaler.last_step.offenders
            assert not math.isfinite(scaler.last_step.norm)
            assert all(p.grad is None for p in model.parameters())
        scaler.update()
    single = kind in {"adamw", "fused adamw", "fused momentum"}
    assert skipped == (0 if single and spoiled == 2 else 2)
    assert scaler.get_scale() == 2.0 ** (16 - skipped)
    left_out = (1, 2, 4, 5) if skipped else range(6)
    expected, reference = plainly(kind, left_out)
    assert torch.equal(expected, weights(model))
    assert str(_numbers(reference)) == str(_numbers(optimizer))


def _numbers(optimizer):
    """List everything an optimizer keeps, in order."""
    base = getattr(optimizer, "base", optimizer)
    states = [*base.state_dict()["state"].values()]
    return [sorted((k, v) for k, v in state.items() if k != "old") for state in states]


@pytest.mark.parametrize("spoiled", [None, "pending", "closure"])
def test_gradients_that_sam_wants_before_the_step_are_unscaled(spoiled):
    """The first pass is the loop's, the second the closure's; either may overflow."""
    results = []
    for scaled in (True, False):
        model = net()
        optimizer = SAM(
            model.parameters(),
            lambda g: torch.optim.SGD(g, lr=0.05),
            first_inside=False,
        )
        scaler = GradScaler("cpu", enabled=scaled)
        for step in range(4):
            bad = step == 2 and spoiled is not None
            if bad and not scaled:
                continue
            optimizer.zero_grad()
            factor = math.inf if bad and spoiled == "pending" else 1.0
            scaler.scale(loss_of(model, step) * factor).backward()

            def closure(step=step, bad=bad, model=model):
                return loss_of(model, step) * (math.inf if bad else 1.0)

            scaler.step(optimizer, closure)
            scaler.update()
            assert scaler.last_step.applied is not bad
        results.append(weights(model))
    assert torch.equal(*results)


@EVERY
def test_a_disabled_scaler_takes_both_forms(kind):
    """`enabled=False` runs the same script."""
    expected, _ = plainly(kind, range(3))
    for form in ("returns", "scales"):
        model = net()
        optimizer = KINDS[kind](model.parameters())
        scaler = GradScaler("cpu", enabled=False)
        for step in range(3):
            closure = closure_for(scaler, model, optimizer, step, form)
            scaler.step(optimizer, closure)
            scaler.update()
        assert torch.equal(expected, weights(model))


@pytest.mark.parametrize("kind", ["lbfgs", "sam", "adamw", "fused adamw"])
def test_clipping_in_the_closure_acts_on_each_evaluation(kind):
    """As `clip_grad_norm_` between `backward` and `step` would without a scaler."""

    def run(scaler):
        model = net()
        optimizer = KINDS[kind](model.parameters())
        norms = []
        for step in range(4):

            def closure(step=step):
                optimizer.zero_grad()
                loss = loss_of(model, step)
                scaler.scale(loss).backward()
                norms.append(scaler.clip_grad_norm_(optimizer, 0.1).item())
                return loss

            scaler.step(optimizer, closure)
            scaler.update()
        assert max(norms) > 0.1
        return weights(model)

    torch.testing.assert_close(
        run(GradScaler("cpu")), run(GradScaler("cpu", enabled=False))
    )


def test_gates_and_the_last_step_follow_the_whole_step():
    """One applied step, however many evaluations; none if one overflowed."""
    model = net()
    optimizer = KINDS["lbfgs"](model.parameters())
    scaler = GradScaler("cpu", policy="headroom")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler.gate(scheduler)
    moved = []
    scaler.gate(lambda: moved.append(1))
    for step in range(4):
        bad = 2 if step == 1 else None
        closure = closure_for(scaler, model, optimizer, step, "returns", bad)
        scaler.step(optimizer, closure)
        scaler.update()
        assert scaler.last_step_of(optimizer).applied is (step != 1)
    assert len(moved) == 3
    assert scheduler.last_epoch == 3


@pytest.mark.parametrize("kind", ["lbfgs", "sam", "adamw", "fused adamw"])
@pytest.mark.parametrize("bad", [None, 2])
def test_masters_take_part(kind, bad):
    """The closure sees FP16 parameters, the optimizer FP32 ones, whatever happens."""
    model = net().half()
    optimizer = KINDS[kind](model.parameters())
    masters = MasterWeights(optimizer)
    scaler = GradScaler("cpu", init_scale=2.0**8)
    seen = set()
    evaluations = []

    def closure():
        evaluations.append(1)
        seen.update(p.dtype for p in model.parameters())
        x, y = batch(0)
        loss = torch.nn.functional.mse_loss(model(x.half()).float(), y)
        spoil = bad is not None and len(evaluations) == bad
        return loss * (math.inf if spoil else 1.0)

    start = closure().item()
    evaluations.clear()
    scaler.step(optimizer, closure)
    scaler.update()
    kept = [master.detach().clone() for master in masters.masters]
    if bad and len(evaluations) == bad:
        assert not scaler.last_step.applied
        fresh = net().half()
        assert torch.equal(weights(fresh), torch.cat([m.flatten() for m in kept]))
        assert torch.equal(weights(fresh), weights(model))
        return
    for _ in range(8):
        scaler.step(optimizer, closure)
        scaler.update()
    assert closure().item() < start
    assert seen == {torch.float16}
    rounded = [master.half() for master in masters.masters]
    assert all(
        torch.equal(a, b) for a, b in zip(rounded, model.parameters(), strict=True)
    )


# -- bad use ------------------------------------------------------------------------


def misuse(closure, match, kind=CallOrderError):
    """Expect an error, and weights as they were."""
    model = net()
    optimizer = KINDS["lbfgs"](model.parameters())
    scaler = GradScaler("cpu")
    before = weights(model)
    with pytest.raises(kind, match=match):
        scaler.step(optimizer, lambda: closure(scaler, model, optimizer))
    assert torch.equal(before, weights(model))


def test_backward_on_the_bare_loss_is_refused():
    def closure(scaler, model, optimizer):
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    misuse(closure, "not scaled.*scaler.scale")


def test_returning_the_scaled_loss_is_refused():
    def closure(scaler, model, optimizer):
        loss = scaler.scale(loss_of(model, 0))
        loss.backward()
        return loss

    misuse(closure, "returned the scaled loss")


@pytest.mark.parametrize("result", ["none", "number", "detached"])
def test_a_closure_without_a_loss_is_refused(result):
    def closure(scaler, model, optimizer):
        loss = loss_of(model, 0)
        return {"none": None, "number": loss.item(), "detached": loss.detach()}[result]

    misuse(closure, "did not call `backward")


def test_updating_in_the_closure_is_refused():
    def closure(scaler, model, optimizer):
        loss = loss_of(model, 0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.update()
        return loss

    misuse(closure, "update")


def test_a_loss_of_another_model_is_refused():
    def closure(scaler, model, optimizer):
        return loss_of(net(1), 0)

    misuse(closure, "holds none of them", CallOrderError)


def test_an_error_of_the_closure_restores_the_starting_point():
    """SAM is away from where it began when the second evaluation fails."""
    model = net()
    optimizer = KINDS["sam"](model.parameters())
    scaler = GradScaler("cpu")
    before = weights(model)
    calls = []

    def closure():
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return loss_of(model, 0)

    with pytest.raises(KeyboardInterrupt):
        scaler.step(optimizer, closure)
    assert torch.equal(before, weights(model))


def test_an_optimizer_that_ignores_its_closure_is_taken_back():
    class Deaf(torch.optim.SGD):
        def step(self, closure=None):
            return super().step()

    model = net()
    optimizer = Deaf(model.parameters(), lr=0.1)
    loss_of(model, 0).backward()
    before = weights(model)
    with pytest.raises(CallOrderError, match="Deaf stepped without calling"):
        GradScaler("cpu").step(optimizer, lambda: loss_of(model, 0))
    assert torch.equal(before, weights(model))


def test_stepping_twice_and_device_mode_are_refused():
    model = net()
    optimizer = KINDS["lbfgs"](model.parameters())
    scaler = GradScaler("cpu")
    scaler.step(optimizer, lambda: loss_of(model, 0))
    with pytest.raises(CallOrderError):
        scaler.step(optimizer, lambda: loss_of(model, 0))
    with pytest.raises(DeviceModeError, match="closure"):
        GradScaler("cpu", sync="never").step(optimizer, lambda: loss_of(model, 0))
