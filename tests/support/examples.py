"""How many examples a property test draws: in `make test` a third of those of `make test-long`."""

from __future__ import annotations

from typing import Any, Final

from hypothesis import settings

SHORT: Final = "same"
"""The profile of `make test`."""
EVERY: Final = "long"
"""The profile of `make test-long`, which runs all property tests again."""
EXAMPLES: Final = 100
"""Of a property test that says no number."""


def examples(count: int, **more: Any) -> settings:
    """Return settings for so many examples, and a third of them in `make test`."""
    is_short = settings.get_current_profile_name() == SHORT
    return settings(max_examples=count // 3 if is_short else count, deadline=None, **more)


def register_profiles() -> None:
    """Property tests draw the same cases in every run; `explore` draws new ones."""
    settings.register_profile(SHORT, derandomize=True, deadline=None, max_examples=EXAMPLES // 3)
    settings.register_profile(EVERY, derandomize=True, deadline=None, max_examples=EXAMPLES)
    settings.register_profile("explore", deadline=None, max_examples=EXAMPLES)
