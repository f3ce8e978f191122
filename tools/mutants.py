"""Change the code in small ways, and see whether the tests notice.

    python tools/mutants.py [--seed N] [--count N] [--only GLOB] [--list]

Takes mutants of SOURCES by a fixed seed, runs TESTS against each, and fails if fewer
than 95 % die of those that equivalent_mutants.txt does not list.  The checkout is never
written to: each mutant lives in a copy of src.  This process imports what is heavy and
does not change, then forks for each mutant, so that none waits for torch.
"""

import argparse
import compileall
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from py_compile import PycInvalidationMode

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.mutate import Mutant, mutants_of  # noqa: E402

SOURCES = (
    "src/buoy/torch/*.py",
    "src/buoy/_backends/torch/gradients.py",
    "src/buoy/_backends/torch/inspection.py",
    "src/buoy/_backends/torch/measure.py",
    "src/buoy/_core/step.py",
    "src/buoy/_core/verdicts.py",
    "src/buoy/jax/apply.py",
)

# What is run against a mutant of a file, as pytest's arguments: stage by stage, the
# fastest first; the first that fails kills it.  The first pattern that fits counts.
_EVERYDAY = tuple(
    f"tests/torch/{name}.py"
    for name in (
        "centre/test_methods",
        "contract/test_recipients",
        "centre/test_scale_tensor",
        "centre/test_gathered",
        "centre/test_clip",
        "contract/test_drop_in",
        "centre/test_steps",
        "centre/test_rows",
        "centre/test_stale_looks",
        "centre/test_verdicts",
        "centre/test_resume",
        "centre/test_bad_options",
        "contract/test_wrappers",
        "centre/test_known",
        "centre/test_bounds",
        "contract/test_copies",
        "centre/test_dtypes",
        "centre/test_idle",
        "contract/test_call_order",
        "features/test_record",
        "centre/test_no_wait",
        "centre/test_policies",
    )
)
_OTHERS = (
    "-m",
    "not slow",
    "tests/torch",
    "--ignore=tests/torch/ranks",
    *(f"--ignore={one}" for one in _EVERYDAY),
)
_TORCH = (("-m", "not slow", *_EVERYDAY), _OTHERS)
_RANKS = ("tests/torch/ranks/test_ranks.py",)
_NORMS = tuple(
    f"tests/torch/ranks/test_norm_rules.py::test_{name}"
    for name in (
        "the_norm_is_that_of_the_unsharded_network[routed-False]",
        "the_norm_is_that_of_the_unsharded_network[routed-True]",
        "the_norm_is_that_of_the_unsharded_network[fsdp2 x stages-False]",
        "the_norm_is_that_of_the_unsharded_network[partial-False]",
        "the_norm_is_right_where_the_host_reads_nothing[routed]",
        "gradients_that_differ_are_refused[routed-False]",
        "an_error_gives_what_each_rank_holds",
        "where_nobody_reads_the_error_comes_late",
        "a_group_on_some_ranks_only_is_an_error",
        "orders_that_differ_are_an_error",  # for every pair of orders
        "a_rank_that_has_nothing_counts_nothing",
        "an_overflow_of_one_rank_is_a_skip_and_no_mismatch[routed-False-inf]",
        "clipping_sends_what_the_documents_say[averaged by hand-1]",
        "clipping_sends_what_the_documents_say[fsdp2 x stages-4]",
    )
)
_FEW_RANKS = tuple(
    f"tests/torch/ranks/test_ranks.py::test_{name}"
    for name in (
        "a_rank_with_another_state_is_named_where_the_host_has_to_ask",
        "torchs_flags_and_norm_are_those_that_the_ranks_agreed_on",
        "a_loss_that_jumps_on_one_rank_is_foreseen_by_all",
    )
)
_ORDERS = ("tests/torch/ranks/test_norms.py::test_a_norm_that_has_no_parts_is_refused",)
_SHARDS = ("tests/torch/ranks/test_features.py::test_shards_are_not_judged_alone",)
_RUNS = "tests/torch/ranks/test_pipeline.py::test_{}_runs_in_a_pipeline"
_PIPELINE = (_RUNS.format("a_policy_that_looks_at_the_loss"),)
_MEASURES = ("-m", "not slow", "tests/test_backends.py", "tests/test_sample.py")
_CORE = (
    ("tests/test_verdicts.py",),
    ("-m", "not slow", "tests/test_step.py", "tests/test_sample.py"),
    ("tests/test_scale_bounds.py", "tests/torch/centre/test_verdicts.py"),
)
_ONE = "tests/test_trajectory.py::test_one_history_makes_one_trajectory"
_TRAJECTORY = (f"{_ONE}[jax-headroom]", f"{_ONE}_with_clipping[jax-headroom]")
_JAX = (
    (*_TRAJECTORY, "tests/jax/test_steps.py", "tests/jax/test_gradients.py"),
    ("-m", "not slow", "tests/jax"),
)
TESTS: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    ("src/buoy/jax/*", _JAX),
    ("src/buoy/torch/contract.py", (*_TORCH, _RANKS)),
    ("src/buoy/torch/distributed.py", (_RANKS, _NORMS, *_TORCH)),
    ("src/buoy/torch/pending.py", (*_TORCH, _FEW_RANKS)),
    ("src/buoy/torch/optimizers.py", (*_TORCH, _FEW_RANKS)),
    ("src/buoy/torch/options.py", (*_TORCH, _ORDERS)),
    ("src/buoy/torch/scale.py", (*_TORCH, _FEW_RANKS)),
    ("src/buoy/torch/scaler.py", (*_TORCH, _PIPELINE)),
    ("src/buoy/torch/step.py", (*_TORCH, _RANKS, _NORMS)),
    ("src/buoy/torch/*", _TORCH),
    ("src/buoy/_backends/torch/gradients.py", (*_TORCH, _NORMS, _SHARDS)),
    ("src/buoy/_backends/torch/inspection.py", (*_TORCH, _NORMS, _SHARDS)),
    ("src/buoy/_backends/torch/*", (*_TORCH, _MEASURES)),
    ("src/buoy/_core/*", (*_CORE, *_TORCH, *_JAX)),
)
PRELOADED = ("torch", "numpy", "pytest")  # JAX must not be forked
EQUIVALENT = ROOT / "tools" / "equivalent_mutants.txt"
ENOUGH = 0.95
DIED = (
    pytest.ExitCode.TESTS_FAILED,
    pytest.ExitCode.INTERRUPTED,
    pytest.ExitCode.INTERNAL_ERROR,
)
OTHER_CODE = 99  # what a run exits with if it has tested other code than the mutant


def sources(patterns: tuple[str, ...]) -> list[Path]:
    """Find the files; a pattern that finds none is a mistake."""
    found: set[Path] = set()
    for pattern in patterns:
        some = set(ROOT.glob(pattern))
        if not some:
            sys.exit(f"SOURCES names {pattern}, and there is no such file.")
        found |= some
    return sorted(found)


def all_mutants(only: str = "*") -> list[Mutant]:
    """List every mutant of the sources, in a fixed order."""
    names = [path.relative_to(ROOT).as_posix() for path in sources(SOURCES)]
    return [
        mutant
        for name in names
        if fnmatch(name, only)
        for mutant in mutants_of((ROOT / name).read_text(), name)
    ]


def sample(mutants: list[Mutant], seed: int, count: int) -> list[Mutant]:
    """Take some, the same for the same seed."""
    shuffled = random.Random(seed).sample(mutants, len(mutants))
    return list(islice((mutant for mutant in shuffled if mutant.valid), count))


def equivalents(text: str) -> dict[str, str]:
    """Read the list: the mutant's key, ` :: `, and why it is equivalent."""
    found = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            key, _, reason = line.rpartition(" :: ")
            found[key.strip()] = reason.strip()
    return found


def stages_for(file: str) -> tuple[tuple[str, ...], ...]:
    """Find what is run against mutants of a file."""
    return next(stages for pattern, stages in TESTS if fnmatch(file, pattern))


@dataclass
class Job:
    """One mutant, or the code as it is, on its way through the stages."""

    mutant: Mutant | None
    stages: tuple[tuple[str, ...], ...]
    stage: int = 0
    fate: str = ""  # in the end "killed", "survived" or "timed out"

    @property
    def tests(self) -> tuple[str, ...]:
        """What is run in the present stage."""
        return self.stages[self.stage]


@dataclass
class Run:
    """A forked process that runs one stage."""

    job: Job
    copy: Path
    started: float = field(default_factory=time.monotonic)


class Laboratory:
    """Copies of src, and processes that test them."""

    def __init__(self, home: Path, jobs: int) -> None:
        self.home = home
        self.limits: dict[tuple[str, ...], float] = {}  # seconds, by stage
        self.free: list[Path] = []
        self.running: dict[int, Run] = {}
        # Checked by their content: times of change are too coarse for mutants.
        sys.pycache_prefix = str(home / "pycache")
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
        for number in range(jobs):
            copy = home / f"copy{number}"
            shutil.copytree(
                ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__")
            )
            mode = PycInvalidationMode.CHECKED_HASH
            compileall.compile_dir(copy, quiet=2, invalidation_mode=mode)
            self.free.append(copy)

    def run(self, jobs: list[Job]) -> Iterator[Job]:
        """Run jobs on all copies at once; yield each that is done."""
        waiting = list(reversed(jobs))
        try:
            while waiting or self.running:
                while waiting and self.free:
                    self._start(waiting.pop(), self.free.pop())
                for run in self._ended():
                    if run.job.fate:
                        yield run.job
                        self._restore(run)
                    else:
                        self._fork(run.job, run.copy)
        finally:
            for pid in self.running:
                _end(pid)

    def _start(self, job: Job, copy: Path) -> None:
        if job.mutant is not None:
            self._file(job.mutant, copy).write_text(job.mutant.mutated)
        self._fork(job, copy)

    def _restore(self, run: Run) -> None:
        if run.job.mutant is not None:
            self._file(run.job.mutant, run.copy).write_text(run.job.mutant.text)
        self.free.append(run.copy)

    @staticmethod
    def _file(mutant: Mutant, copy: Path) -> Path:
        return copy / Path(mutant.file).relative_to("src")

    def _fork(self, job: Job, copy: Path) -> None:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _run_tests(copy, job.tests)
        self.running[pid] = Run(job, copy)

    def _ended(self) -> Iterator[Run]:
        """Wait until a process ends, or has to be ended."""
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            _end(pid)  # what it may have started
            run = self.running.pop(pid)
            self._settle(run, os.waitstatus_to_exitcode(status))
            yield run
            return
        for late, run in list(self.running.items()):
            limit = self.limits.get(run.job.tests)
            if limit is not None and time.monotonic() - run.started > limit:
                _end(late)
                os.waitpid(late, 0)
                del self.running[late]
                run.job.fate = "timed out"
                yield run
                return
        time.sleep(0.05)

    def _settle(self, run: Run, code: int) -> None:
        """Send a job on to its next stage, or note what became of it."""
        job = run.job
        tests = job.tests
        if job.mutant is None:  # how long it takes if nothing is wrong
            if code != pytest.ExitCode.OK:
                print(_log(run.copy).read_text()[-5000:])
                sys.exit(f"{' '.join(tests)} fail without any mutant: exit code {code}")
            took = time.monotonic() - run.started
            self.limits[tests] = 20.0 + 4.0 * took
            print(f"{took:5.0f} s without a mutant: {' '.join(tests)}", flush=True)
        elif code != pytest.ExitCode.OK:
            killed_by_signal = code < 0
            if not killed_by_signal and code not in DIED:
                sys.exit(f"pytest could not run {' '.join(tests)}: exit code {code}")
            job.fate = "killed"
            return
        job.stage += 1
        if job.stage == len(job.stages):
            job.fate = "survived"


def _end(pid: int) -> None:
    """End a process and all that it started: it leads a group of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _log(copy: Path) -> Path:
    return copy.with_suffix(".txt")


def _run_tests(copy: Path, arguments: tuple[str, ...]) -> None:
    """Run tests against a copy of src, in a process of its own, and end it."""
    os.setsid()
    code = int(pytest.ExitCode.INTERNAL_ERROR)
    try:
        os.environ["PYTHONPATH"] = str(copy)
        sys.path.insert(0, str(copy))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        said = os.open(_log(copy), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(said, stream)

        options = ["-x", "-q", "-o", "addopts=--import-mode=importlib"]
        options += ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:doctest"]
        code = int(pytest.main([*options, *arguments]))
        import buoy  # noqa: PLC0415

        if not Path(buoy.__file__).is_relative_to(copy):
            code = OTHER_CODE
    except BaseException:  # noqa: BLE001 - what the parent is told
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def report(jobs: list[Job], known: int) -> bool:
    """Print what became of the mutants; say whether enough died."""
    lived = [job for job in jobs if job.fate == "survived"]
    for job in lived:
        if job.mutant is not None:
            print(f"\nsurvived: {job.mutant.key}\n{job.mutant.diff}")
    late = sum(job.fate == "timed out" for job in jobs)
    died = len(jobs) - len(lived)
    share = died / len(jobs) if jobs else 1.0
    print(
        f"\n{died} killed ({late} by the time limit), {len(lived)} survived, "
        f"{known} known to be equivalent: {share:.1%} of {len(jobs)} died, "
        f"{ENOUGH:.0%} must."
    )
    return share >= ENOUGH


def main() -> int:
    """Run as a command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="*", help="a glob of source files")
    parser.add_argument("--list", action="store_true", help="print them, run nothing")
    given = parser.parse_args()

    os.chdir(ROOT)
    every = all_mutants(given.only)
    known = equivalents(EQUIVALENT.read_text())
    stale = set(known) - {mutant.key for mutant in every}
    if stale and given.only == "*":
        print("Not a mutant any more:", *sorted(stale), sep="\n  ")
        return 1
    taken = sample(every, given.seed, given.count)
    new = [mutant for mutant in taken if mutant.key not in known]
    print(f"{len(taken)} of {len(every)} mutants, seed {given.seed}", flush=True)
    if given.list:
        print(*(mutant.key for mutant in taken), sep="\n")
        return 0

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end what was started
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # see conftest
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for name in PRELOADED:
        __import__(name)
    jobs = [Job(mutant, stages_for(mutant.file)) for mutant in new]
    with tempfile.TemporaryDirectory(prefix="mutants-") as home:
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(Path(home) / "hypothesis")
        laboratory = Laboratory(Path(home).resolve(), given.jobs)
        stages = dict.fromkeys(stage for job in jobs for stage in job.stages)
        for _ in laboratory.run([Job(None, (stage,)) for stage in stages]):
            pass
        for number, job in enumerate(laboratory.run(jobs), 1):
            what = "" if job.mutant is None else job.mutant.key
            print(f"{number:3d} {job.fate}: {what}", flush=True)
    return 0 if report(jobs, len(taken) - len(new)) else 1


if __name__ == "__main__":
    sys.exit(main())
