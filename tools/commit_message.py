"""Check the message of a commit: the hook `commit-message` of .pre-commit-config.yaml."""

from __future__ import annotations

import re
import sys
from pathlib import Path

SUBJECT = re.compile(r"[a-z0-9_./-]+(, [a-z0-9_./-]+)*: [a-z]")
MAX_SUBJECT = 72
GENERATED = ("Merge ", "Revert ", "fixup! ", "squash! ")


def problems(message: str) -> list[str]:
    """Return what is wrong with a message, one line each."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = lines[0] if lines else ""
    if subject.startswith(GENERATED):
        return []
    found = []
    if not SUBJECT.match(subject):
        found.append(f"the subject is not `package: imperative`: {subject!r}")
    if len(subject) > MAX_SUBJECT:
        found.append(f"the subject has {len(subject)} characters, not at most {MAX_SUBJECT}")
    if len(lines) > 1 and lines[1].strip():
        found.append("the second line is not empty")
    if not any(line.strip() for line in lines[2:]):
        found.append("there is no body that says why")
    return found


def main(arguments: list[str]) -> int:
    """Check the file with the message; return 1 if something is wrong."""
    found = problems(Path(arguments[0]).read_text(encoding="utf-8"))
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
