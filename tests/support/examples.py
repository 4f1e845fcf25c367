"""How many examples a property tries, scaled by the hypothesis profile."""

from hypothesis import settings

BY_DEFAULT = 50
"""Examples of a property that asks for no number, in the profiles of daily use."""


def examples(count, **others):
    """Settings of a property that tries `count` examples daily, and as many times more in a thorough profile."""
    return settings(max_examples=count * settings().max_examples // BY_DEFAULT, **others)
