"""The number of examples of a property, scaled by the hypothesis profile."""

from hypothesis import settings

BY_DEFAULT = 50
"""The default number of examples in the profiles of daily use."""


def examples(count, **others):
    """Settings of a property with `count` examples in daily use, and proportionally more in a thorough profile."""
    return settings(max_examples=count * settings().max_examples // BY_DEFAULT, **others)
