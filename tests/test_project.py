"""The files around the code: workflows, templates, hooks."""

import re
import shutil
import subprocess
import sys
import tomllib
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


def lint(folder):
    """Let zizmor read a folder `.github`; a file that it cannot read is an error."""
    zizmor = shutil.which("zizmor", path=str(Path(sys.executable).parent))
    assert zizmor, "zizmor is in the dev group: run `make`"
    return subprocess.run(
        [zizmor, "--offline", "--no-progress", "--strict-collection", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_workflows_pass_their_linter():
    """They cannot run here, so a linter reads them: form, permissions, pins."""
    done = lint(ROOT / ".github")

    assert 0 == done.returncode, done.stdout + done.stderr
    for path in WORKFLOWS:
        assert f"workflows/{path.name}" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("runs-on:", "runs_on:"),
        ("- uses:", "- use:"),
        ("run: bash .ci/run", "run: echo ${{ github.head_ref }}"),
        ("@08c6903cd8c0fde910a37f88322edcfb5dd907a8", "@v5"),
    ],
)
def test_a_wrong_workflow_would_be_found(right, wrong, tmp_path):
    """The linter can fail."""
    shutil.copytree(ROOT / ".github", tmp_path / ".github")
    broken = tmp_path / ".github" / "workflows" / "test.yml"
    assert right in broken.read_text()
    broken.write_text(broken.read_text().replace(right, wrong))

    assert 0 != lint(tmp_path / ".github").returncode


def test_the_workflows_cover_what_the_package_supports():
    """Every Python of the classifiers, with the oldest and the newest dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    job = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
    matrix = job["versions"]["strategy"]["matrix"]

    assert {"python": named, "dependencies": ["oldest", "newest"]} == matrix
    used = re.findall(r"matrix\.(\w+)", str(job["versions"]))
    assert set(matrix) == set(used)


def test_releases_are_published_without_a_stored_secret():
    """By trusted publishing: one job may prove what it is, and nothing else."""
    text = (ROOT / ".github/workflows/release.yml").read_text()
    publish = yaml.safe_load(text)["jobs"]["publish"]

    assert {"id-token": "write"} == publish["permissions"]
    assert publish["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert "secrets." not in text


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


def test_hooks_are_targets_of_make():
    """They use its tools, and need no set-up that it does not do."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"] for repo in hooks for hook in repo["hooks"]]

    assert ["local"] == [repo["repo"] for repo in hooks]
    assert entries
    for entry in entries:
        target = entry.removeprefix("make ")
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    "name", ["CITATION.cff", "SECURITY.md", "CODE_OF_CONDUCT.md", "LICENSE"]
)
def test_strangers_find_what_they_look_for(name):
    """Hosts show these files under fixed names."""
    assert (ROOT / name).read_text().strip()
