"""Print the coverage of each package: `make coverage`."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COUNTS = ("covered_lines", "num_statements", "covered_branches", "num_branches")


def table(report: Mapping[str, Any]) -> str:
    """Return one line per package, and one for the total, from coverage's JSON report."""
    sums: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(COUNTS, 0))
    for file, found in report["files"].items():
        parts = Path(file).parts
        package = parts[1] if len(parts) > 2 else "(modules)"  # noqa: PLR2004 (root, package, file)
        for name in COUNTS:
            sums[package][name] += found["summary"][name]
    total = {name: sum(one[name] for one in sums.values()) for name in COUNTS}
    rows = [*sorted(sums.items()), ("total", total)]
    return "\n".join(
        [f"{'package':<14} {'statements':>10} {'lines':>8} {'branches':>9}"]
        + [
            f"{name:<14} {one['num_statements']:>10,} "
            f"{_percent(one['covered_lines'], one['num_statements']):>8} "
            f"{_percent(one['covered_branches'], one['num_branches']):>9}"
            for name, one in rows
        ]
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
