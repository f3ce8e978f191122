"""Print what each policy keeps and computes in a step, as a table in markdown.

    python benchmarks/policy_operations.py

Counted are the fields of the state, and the operations on numbers: operators, and the
five functions of a rule.  On a device that compiles nothing, each operation is a kernel
of its own.  torch's rule is first; the others follow by their number of operations.
"""

import buoy
from buoy._core.symbols import operations, state_fields


def row(name: str) -> str:
    """Return one line of the table."""
    policy = buoy.policy(name)
    names = state_fields(policy)
    listed = ", ".join(f"`{each}`" for each in names)
    return f"| `{name}` | {operations(policy)} | {len(names)} | {listed} |"


def ordered() -> list[str]:
    """Return the names of all policies in the order of the table."""
    others = [name for name in buoy.policies() if name != "torch"]
    others.sort(key=lambda name: (operations(buoy.policy(name)), name))
    return ["torch", *others]


def main() -> None:
    """Print the table."""
    print("| policy | operations | fields | state |")
    print("|---|--:|--:|---|")
    for name in ordered():
        print(row(name))


if __name__ == "__main__":
    main()
