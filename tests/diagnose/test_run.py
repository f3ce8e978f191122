"""`buoy run` and `buoy doctor` on the command line, in processes of their own."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import buoy
import buoy.trace
from buoy.diagnose import examine
from buoy.integrations.install import install

pytestmark = pytest.mark.slow  # starts processes

SCRIPTS = Path(__file__).parent / "scripts"
SOURCE = str(Path(buoy.__file__).parents[1])
BAD = sorted(path.stem.removeprefix("bad_") for path in SCRIPTS.glob("bad_*.py"))
GOOD = sorted(path.stem for path in SCRIPTS.glob("good_*.py"))


def command(*arguments, cwd=None):
    """Run the command line."""
    return subprocess.run(
        [sys.executable, "-m", "buoy", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        timeout=120,
        env={**os.environ, "PYTHONPATH": SOURCE, "PYTHONWARNINGS": "ignore"},
    )


def test_a_script_runs_on_buoy_unedited_and_is_recorded(tmp_path):
    """Arguments are the script's own, the trace says what happened."""
    script = str(SCRIPTS / "good_trainer.py")
    done = command(
        "run", "--policy", "torch", "--report-file", "page.html", script, "--steps",
        "12", "--lr", "0.01", cwd=tmp_path,
    )  # fmt: skip
    kept = buoy.trace.load(tmp_path / "run.buoy")

    assert (0, "") == (done.returncode, done.stdout)
    assert "buoy: recorded run.buoy\nbuoy: wrote page.html\n" == done.stderr
    assert "<html" in (tmp_path / "page.html").read_text()
    assert 12 == len(kept.rows)
    assert 2.0**12 == kept.rows[0].scale
    assert all(row.amax is not None for row in kept.rows)


def test_headroom_is_the_default_and_what_it_replaces_is_said(tmp_path):
    """One line on stderr when the scaler is made; the report is a plain flag."""
    script = str(SCRIPTS / "good_trainer.py")
    done = command("run", "--report", script, "--steps", "12", cwd=tmp_path)
    kept = buoy.trace.load(tmp_path / "run.buoy")

    assert (0, "") == (done.returncode, done.stdout)
    assert (
        "buoy: policy headroom in place of torch's rule, replacing the script's "
        "init_scale=2^12; `buoy run -p torch` keeps the script's settings\n"
        "buoy: recorded run.buoy\nbuoy: wrote report.html\n"
    ) == done.stderr
    assert "<html" in (tmp_path / "report.html").read_text()
    assert buoy.policy("headroom").init().scale == kept.rows[0].scale


def test_settings_changed_while_training_are_replaced_too(tmp_path):
    """torch accepts them at any time, so the script must not fail for them."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "scaler = torch.amp.GradScaler('cpu')\n"
        "for _ in range(2):\n"
        "    scaler.set_growth_interval(500)\n"
        "torch.amp.GradScaler('cpu', 2.0, enabled=False).set_growth_factor(3.0)\n"
    )
    done = command("run", "--no-trace", str(script), cwd=tmp_path)
    start = "buoy: policy headroom in place of torch's rule"
    kept = "`buoy run -p torch` keeps"

    assert 0 == done.returncode, done.stderr
    own = ", replacing the script's growth_interval=500"
    assert [
        f"{start}; {kept} that rule",
        f"{start}{own}; {kept} the script's settings",
    ] == done.stderr.splitlines()


@pytest.mark.parametrize(
    ("name", "option"), [("run", "--report"), ("run", "-p=x"), ("doctor", "--json")]
)
def test_an_option_after_the_script_is_the_scripts(name, option, tmp_path):
    """If the script refuses it, the order that was meant is shown."""
    script = str(SCRIPTS / "good_trainer.py")
    done = command(name, script, option, cwd=tmp_path)

    assert 2 == done.returncode
    assert (
        f"buoy: `{option}` went to the script. Options of `buoy {name}` go before it: "
        f"`buoy {name} {option} SCRIPT ...`."
    ) in done.stderr


def test_another_policy_can_be_tried(tmp_path):
    """The script's own settings are torch's and stay behind."""
    script = str(SCRIPTS / "good_trainer.py")
    done = command(
        "run", "-p", "backoff:init_scale=2**9", "--json", script, "--steps", "3",
        cwd=tmp_path,
    )  # fmt: skip
    said = json.loads(done.stdout)

    assert {
        "exit_code": 0,
        "scalers": 1,
        "policy": "backoff:init_scale=2**9",
        "replaced": [{"init_scale": 4096.0}],
        "traces": ["run.buoy"],
        "report": None,
    } == said
    assert 2.0**9 == buoy.trace.load(tmp_path / "run.buoy").rows[0].scale


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        ("torch", (2.0**8, 4.0, 0.5)),
        ("headroom:init_scale=2**9", (2.0**9, 2.0, 0.5)),
    ],
)
def test_every_spelling_of_the_import_gives_ours(policy, wanted, tmp_path):
    """Also the old ones with their warning, FSDP's, copies and pickles."""
    script = str(SCRIPTS / "run_spellings.py")
    done = command("run", "--no-trace", "-p", policy, script, cwd=tmp_path)

    assert 0 == done.returncode, done.stderr
    settings, copied = {wanted}, (wanted[0], wanted[0])
    assert f"True True 4 {settings} {copied}\n" == done.stdout
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("code", 7, ""),
        ("words", 1, "a last word"),
        ("error", 1, "KeyError: 'lost'"),
        ("interrupt", 130, "KeyboardInterrupt"),
        ("well", 0, ""),
    ],
)
def test_a_script_ends_as_it_would_alone(how, code, said, tmp_path):
    """Exit codes, last words, tracebacks that start in the script, Ctrl-C."""
    done = command("run", str(SCRIPTS / "run_endings.py"), how, "--steps", cwd=tmp_path)

    assert code == done.returncode
    assert said in done.stderr
    if "Traceback" in done.stderr:
        first = done.stderr.splitlines()[1]
        assert "run_endings.py" in first
    if how == "well":
        assert "__main__ ['well', '--steps'] True\n" == done.stdout


def test_a_module_runs_like_python_dash_m(tmp_path):
    """From the current folder, with its own arguments."""
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(
        "import sys, torch\nfrom . import __name__ as own\n"
        "print(own, sys.argv[1:], hasattr(torch.amp.GradScaler('cpu'), 'last_step'))\n"
    )
    done = command("run", "--no-trace", "-m", "pack.train", "-x", cwd=tmp_path)

    assert "pack ['-x'] True\n" == done.stdout


@pytest.mark.parametrize("name", ["run", "doctor"])
def test_a_script_that_is_not_there_is_said(name, tmp_path):
    """Without a traceback."""
    done = command(name, "nowhere.py", cwd=tmp_path)

    assert 1 == done.returncode
    assert "There is no script 'nowhere.py'." in done.stderr
    assert "Traceback" not in done.stderr


def test_the_doctor_speaks_on_the_command_line(tmp_path):
    """In words with the line of the script, as JSON, and by its exit code."""
    script = SCRIPTS / "bad_clipped_scaled.py"
    noisy = tmp_path / "noisy.py"
    noisy.write_text("print('noise')\n" + script.read_text())
    words = command("doctor", "--steps", "5", str(script))
    done = command("doctor", "--json", "--steps", "5", str(noisy))
    said = json.loads(done.stdout)

    assert (1, 1) == (words.returncode, done.returncode)
    line = (
        script.read_text()
        .split("\n")
        .index("    clip_grad_norm_(model.parameters(), 1.0)")
    )
    assert f"bad_clipped_scaled.py:{line + 1}" in words.stdout
    assert "scaler.unscale_(optimizer)" in words.stdout
    assert max(map(len, words.stdout.splitlines())) < 80
    assert 5 == said["steps"]
    assert ["clipped_scaled"] == [finding["code"] for finding in said["findings"]]
    assert {"code", "what", "where", "why", "remedy"} == set(said["findings"][0])


def test_options_are_frozen():
    """They change only together with a line in CHANGELOG.md."""
    from buoy.cli.app import app

    options = {
        name: sorted(o for p in app.commands[name].params for o in p.opts)
        for name in ("doctor", "run")
    }

    assert [
        "--force-skip", "--json", "--module", "--steps", "-m", "args", "target",
    ] == options["doctor"]  # fmt: skip
    assert [
        "--json", "--module", "--no-trace", "--policy", "--report", "--report-file",
        "--trace", "-m", "-p", "args", "target",
    ] == options["run"]  # fmt: skip


# -- Buoy's scaler, in this process ---------------------------------------------------


def examined(script):
    """Examine a script that gets Buoy's scaler wherever it asks for torch's."""
    with install():
        return examine(str(SCRIPTS / f"{script}.py"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("code", BAD)
def test_misuse_of_buoys_scaler_gives_the_same_finding(code):
    """Where it is an error of Buoy's, too."""
    assert [code] == [finding.code for finding in examined(f"bad_{code}").findings]


@pytest.mark.parametrize("script", GOOD)
def test_correct_scripts_on_buoys_scaler_give_none(script):
    """And no warning: they are errors here."""
    seen = examined(script)

    assert [] == seen.findings
    assert seen.error is None


def test_libraries_that_are_loaded_already_get_ours_too(monkeypatch):
    """Whatever they call it."""
    library = types.ModuleType("some_library")
    library.Held = torch.amp.GradScaler
    monkeypatch.setitem(sys.modules, "some_library", library)
    with install():
        made = library.Held("cpu")

    assert made.last_step is None
    assert isinstance(made, library.Held)


def test_torch_is_put_back():
    """The names mean what they meant."""
    before = torch.amp.GradScaler, torch.cuda.amp.GradScaler
    with install():
        assert issubclass(torch.amp.GradScaler, before[0])
        assert before[0] is not torch.amp.GradScaler
    assert before == (torch.amp.GradScaler, torch.cuda.amp.GradScaler)
