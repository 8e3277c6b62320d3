"""Copy the Grafana dashboard and the alert rules: python -m kcl_pipeline.metrics.monitoring DIR."""

import sys
from pathlib import Path

from kcl_pipeline.metrics.monitoring import copy_to


def main(arguments: list[str]) -> int:
    """Copy the files to the folder that is named; return the exit code."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write("usage: python -m kcl_pipeline.metrics.monitoring FOLDER\n")
        return 2
    for path in copy_to(Path(arguments[0])):
        sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
