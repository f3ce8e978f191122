"""The doctor: watch a program for some steps, then say what is wrong."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from buoy.diagnose.doctor.facts import Facts
from buoy.diagnose.doctor.findings import Finding, findings
from buoy.diagnose.doctor.watching import Enough, Watching
from buoy.diagnose.program import ProgramError, run_program

__all__ = ["Doctor", "Examined", "examine"]


class Doctor:
    """Watch the training inside a `with` block; then `findings` says what is wrong.

    Args:
        force_skip: make the tenth step overflow if none was skipped by then, to see
            whether schedulers wait; see `examine`.

    Example:
        >>> import torch, buoy.torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = buoy.torch.GradScaler("cpu")
        >>> with scaler.doctor() as doctor:
        ...     for _ in range(5):
        ...         optimizer.zero_grad()
        ...         with torch.autocast("cpu", torch.float16):
        ...             loss = model(torch.ones(4, 2)).float().square().mean()
        ...         scaler.scale(loss).backward()
        ...         optimizer.step()
        >>> [finding.code for finding in doctor.findings]
        ['direct_step']
    """

    def __init__(self, *, force_skip: bool = False) -> None:
        self._force_skip = force_skip
        self._watching: Watching | None = None
        self.facts = Facts()
        self.findings: list[Finding] = []

    def __enter__(self) -> Self:
        self._watching = Watching(force_skip=self._force_skip)
        self._watching.install()
        return self

    def __exit__(self, *_: object) -> None:
        if self._watching is not None:
            self.facts = self._watching.remove()
            self.findings = findings(self.facts)

    def __str__(self) -> str:
        return in_words(self.findings, self.facts.steps)


@dataclass(frozen=True, slots=True)
class Examined:
    """The result of an examination; print it to read it in words.

    Example:
        >>> print(Examined([], Facts(steps=5), None))
        5 steps watched. Nothing wrong was found.
    """

    findings: list[Finding]
    facts: Facts
    error: BaseException | None  # what the program ended with, if not with success

    def __str__(self) -> str:
        return in_words(self.findings, self.facts.steps)


def examine(
    target: str,
    args: Sequence[str] = (),
    *,
    module: bool = False,
    steps: int = 50,
    force_skip: bool = False,
) -> Examined:
    """Run a script for some steps, without changes, and report what is wrong.

    Args:
        target: the script's file, or with `module` a module's name, as for `python -m`.
        args: the script's own arguments.
        module: whether `target` is a module.
        steps: the number of steps after which the script is stopped.
        force_skip: make the tenth step of an optimizer that has a scheduler overflow,
            if none was skipped by then, to see whether the scheduler waits.

    Example:
        >>> import tempfile
        >>> script = tempfile.NamedTemporaryFile("w", suffix=".py")
        >>> _ = script.write("print('nothing is trained here')"), script.flush()
        >>> print(examine(script.name))
        nothing is trained here
        No optimizer took a step: there was nothing to watch.
    """
    error: BaseException | None = None
    watching = Watching(steps, force_skip=force_skip)
    watching.install()
    try:
        run_program(target, args, module=module)
    except Enough:
        pass
    except ProgramError:
        raise
    except SystemExit as end:
        failed = end.code not in (None, 0)
        error = end if failed else None
    except (Exception, KeyboardInterrupt) as caught:  # noqa: BLE001
        error = caught
    finally:
        facts = watching.remove()
    return Examined(findings(facts), facts, error)


def in_words(found: Sequence[Finding], steps: int, width: int = 79) -> str:
    """Say everything, worst first; or that there is nothing to say."""
    if not steps:
        return "No optimizer took a step: there was nothing to watch."
    seen = "1 step watched." if steps == 1 else f"{steps} steps watched."
    if not found:
        return f"{seen} Nothing wrong was found."
    count = "One problem" if len(found) == 1 else f"{len(found)} problems"
    order = ", the worst first" if found[1:] else ""
    paragraphs = [f"{seen} {count} found{order}:"]
    for number, finding in enumerate(found, 1):
        first, *rest = str(finding).splitlines()
        lines = [_wrapped(f"{number}. {first}", width)]
        lines += [_wrapped(f"   {line}", width) for line in rest]
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)


def _wrapped(text: str, width: int) -> str:
    is_remedy = text.startswith("   ->")
    inner = "      " if is_remedy else "   "
    return textwrap.fill(
        text,
        width,
        subsequent_indent=inner,
        break_long_words=False,
        break_on_hyphens=False,
    )
