"""The table of `make coverage` sums up the files of each package."""

from __future__ import annotations

from tools.coverage_table import table


def counts(lines: int, of: int, branches: int, of_branches: int) -> dict[str, dict[str, int]]:
    return {
        "summary": {
            "covered_lines": lines,
            "num_statements": of,
            "covered_branches": branches,
            "num_branches": of_branches,
        }
    }


def test_files_are_summed_by_package() -> None:
    files = {
        "kcl_pipeline/leases/row.py": counts(9, 10, 2, 4),
        "kcl_pipeline/leases/held.py": counts(10, 10, 4, 4),
        "kcl_pipeline/text.py": counts(5, 5, 0, 0),
    }
    assert table({"files": files}).splitlines() == [
        "package        statements    lines  branches",
        "(modules)               5  100.0 %         -",
        "leases                 20   95.0 %    75.0 %",
        "total                  25   96.0 %    75.0 %",
    ]
