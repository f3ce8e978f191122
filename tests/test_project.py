"""The files around the code: workflows, templates, hooks."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ACTION = re.compile(r"uses: (\S+?)@(\S+)")
COMMIT = re.compile(r"[0-9a-f]{40}")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit(path):
    """A tag can be moved; a commit cannot."""
    used = ACTION.findall(path.read_text())

    assert used
    assert [] == [action for action, at in used if not COMMIT.fullmatch(at)]


@pytest.mark.slow
def test_the_workflows_pass_their_linter():
    """They cannot run here, so a linter reads them: permissions, pins, injection."""
    zizmor = shutil.which("zizmor", path=str(Path(sys.executable).parent))
    assert zizmor, "zizmor is in the dev group: run `make`"
    done = subprocess.run(
        [zizmor, "--offline", "--no-progress", str(ROOT / ".github")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert 0 == done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_targets_that_exist(path):
    """`make docs` in a workflow is a target of the Makefile."""
    makefile = (ROOT / "Makefile").read_text()
    called = re.findall(r"run: make ([\w-]+)", path.read_text())

    for target in called:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_job_has_a_time_limit_and_no_permissions_by_default():
    """A job gets only the permissions that it names."""
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text())

        assert {} == workflow["permissions"]
        assert all("timeout-minutes" in job for job in workflow["jobs"].values())


def test_hooks_use_the_tools_of_make():
    """One version of each tool, pinned in one place."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]

    assert ["local"] == [repo["repo"] for repo in hooks]
    assert all(
        hook["entry"].startswith(".venv/bin/")
        for repo in hooks
        for hook in repo["hooks"]
    )


@pytest.mark.parametrize(
    "name", ["CITATION.cff", "SECURITY.md", "CODE_OF_CONDUCT.md", "LICENSE"]
)
def test_strangers_find_what_they_look_for(name):
    """Hosts show these files under fixed names."""
    assert (ROOT / name).read_text().strip()
