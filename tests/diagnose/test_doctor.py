"""Each misuse gives exactly its finding, and correct scripts give none."""

from pathlib import Path

import pytest
import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optim

from buoy.diagnose import Doctor, examine
from buoy.torch import GradScaler

SCRIPTS = Path(__file__).parent / "scripts"
BAD = sorted(path.stem.removeprefix("bad_") for path in SCRIPTS.glob("bad_*.py"))
GOOD = sorted(path.stem for path in SCRIPTS.glob("good_*.py"))

pytestmark = pytest.mark.filterwarnings("ignore")  # the scripts' own


@pytest.mark.parametrize("code", BAD)
def test_a_misuse_gives_exactly_its_finding(code):
    """One script per misuse."""
    seen = examine(str(SCRIPTS / f"bad_{code}.py"))

    assert [code] == [finding.code for finding in seen.findings]


@pytest.mark.parametrize("script", GOOD)
def test_a_correct_script_gives_none(script):
    """Loops of different style."""
    seen = examine(str(SCRIPTS / f"{script}.py"))

    assert [] == seen.findings
    assert seen.error is None
    assert seen.facts.steps >= 6


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("forward_nonfinite", ["30 of 30 losses", "output is not finite is `1`"]),
        ("unheld", ["2 parameters", "`body.weight`, `body.bias`"]),
        ("underflow", ["`0.weight` (", "2.weight"]),
        ("direct_step", ["`Adam.step()`", "10 times"]),
        ("scheduler_on_skips", ["`OneCycleLR`", "1 of 1 times"]),
        ("recreated", ["10 so far"]),
        ("floor", ["The scale has fallen to 1.52588e-05", "20 steps"]),
    ],
)
def test_findings_name_names(code, names):
    """Layers, classes and counts, not only the kind of mistake."""
    finding = examine(str(SCRIPTS / f"bad_{code}.py")).findings[0]
    said = f"{finding.what} {finding.why}"

    assert [] == [name for name in names if name not in said], said


@pytest.mark.parametrize("code", sorted({*BAD} - {"unheld", "underflow"}))
def test_findings_point_at_the_line(code):
    """In the script itself, not in what watches it."""
    script = SCRIPTS / f"bad_{code}.py"
    where = examine(str(script)).findings[0].where
    name, _, line = where.partition(":")
    text = script.read_text().splitlines()[int(line) - 1]

    assert script.name == name
    words = ("scaler", "Scaler", "clip", ".step()", "backward")
    assert any(word in text for word in words)


def test_a_script_is_ended_after_so_many_steps(tmp_path):
    """What comes later does not happen, what must be done at the end does."""
    script = tmp_path / "long.py"
    text = (SCRIPTS / "good_plain.py").read_text().replace("range(3)", "range(10**9)")
    indented = "".join(f"    {line}\n" for line in text.splitlines())
    mark = tmp_path / "ended"
    script.write_text(f"try:\n{indented}finally:\n    open({str(mark)!r}, 'w')\n")
    seen = examine(str(script), steps=7)

    assert (7, None, []) == (seen.facts.steps, seen.error, seen.findings)
    assert mark.exists()


def test_a_script_that_fails_is_still_examined(tmp_path):
    """What was seen until then is told, and so is the error."""
    script = tmp_path / "failing.py"
    text = (SCRIPTS / "bad_direct_step.py").read_text()
    script.write_text(text + "raise ValueError('the end')\n")
    seen = examine(str(script))

    assert ["direct_step"] == [finding.code for finding in seen.findings]
    assert isinstance(seen.error, ValueError)


def test_a_scale_that_stays_at_its_own_floor_is_reported():
    """Also above 1: it cannot fall further, whatever the gradients are."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.01)
    scaler = GradScaler(
        "cpu", init_scale=256.0, min_scale=64.0, on_stuck=lambda _: None
    )
    with Doctor() as doctor:
        for _ in range(20):
            optimizer.zero_grad()
            scaler.scale(weight.sqrt().sum()).backward()  # infinite at 0
            scaler.step(optimizer)
            scaler.update()

    assert ["floor"] == [finding.code for finding in doctor.findings][:1]
    assert 64.0 == doctor.facts.scalers[0].floor


@pytest.mark.parametrize("scale", [2.0**10, 3.0])
def test_clipping_scaled_gradients_names_the_scale(scale):
    """The one that they were multiplied by, not an example."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    with Doctor() as doctor:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(8, 4)).float().square().mean()
            scaler.scale(loss).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

    assert ["clipped_scaled"] == [finding.code for finding in doctor.findings]
    assert f"{scale:g} times" in doctor.findings[0].why


def _clip_by_hand(model):
    norm = sum(param.grad.square().sum() for param in model.parameters()).sqrt()
    for param in model.parameters():
        param.grad.mul_(torch.clamp(1.0 / norm, max=1.0))


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, GradScaler])
@pytest.mark.parametrize("scale", [2.0**4, 2.0**8, 2.0**14])
@pytest.mark.parametrize("clip", [_clip_by_hand, None])
def test_clipping_that_no_call_shows_is_found(clip, scale, kind):
    """Written by hand; without it nothing is found."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = kind("cpu", init_scale=scale)
    with Doctor() as doctor:
        for _ in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(8, 4)).float().square().mean()
            scaler.scale(loss).backward()
            if clip is None:
                scaler.unscale_(optimizer)
                _clip_by_hand(model)
            else:
                clip(model)
            scaler.step(optimizer)
            scaler.update()

    codes = [finding.code for finding in doctor.findings]
    assert codes == (["clipped_scaled"] if clip else [])


def test_the_doctor_injects_no_skip_unless_asked_to():
    """The same script: watched it takes all its steps, forced it loses one."""
    script = str(SCRIPTS / "good_scheduler.py")
    watched, forced = examine(script), examine(script, force_skip=True)
    skipped = [seen.facts.scalers[0].skipped for seen in (watched, forced)]

    assert [0, 1] == skipped
    assert [] == watched.findings
    assert ["scheduler_on_skips"] == [finding.code for finding in forced.findings]


def traces_of_watching():
    """List all that the doctor wraps, as it is now."""
    return [
        torch.amp.GradScaler.step,
        GradScaler.step,
        GradScaler.clip_grad_norm_,
        torch.autograd.backward,
        torch.autocast.__enter__,
        torch.nn.utils.clip_grad_norm_,
        torch.optim.Optimizer.__init__,
        torch.optim.lr_scheduler.LRScheduler.step,
        dict(optim._global_optimizer_pre_hooks),
        dict(optim._global_optimizer_post_hooks),
        dict(modules._global_forward_hooks),
        dict(modules._global_forward_pre_hooks),
    ]


def test_the_doctor_leaves_nothing_behind():
    """Every wrapper and hook is gone, also after an error."""
    before = traces_of_watching()
    with GradScaler("cpu").doctor():
        assert before != traces_of_watching()
    with pytest.raises(KeyError), GradScaler("cpu").doctor():
        raise KeyError

    assert before == traces_of_watching()


def test_the_forced_overflow_never_reaches_the_weights():
    """It is put in before the check; the step is skipped."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    scaler = GradScaler("cpu", init_scale=2.0**8)
    skipped = []
    with Doctor(force_skip=True) as doctor:
        for _ in range(15):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(8, 4)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            skipped.append(scaler.last_step.skipped)
            if scaler.last_step.applied:
                scheduler.step()

    assert [9] == [step for step, skip in enumerate(skipped) if skip]
    assert [] == doctor.findings
    assert torch.isfinite(model.weight).all()
