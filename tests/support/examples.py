"""The number of examples of a property, scaled by the hypothesis profile."""

from hypothesis import settings

BY_DEFAULT = 50
"""Default number of examples in the everyday profiles."""


def examples(count, **others):
    """Return settings of a property with `count` examples by default, and proportionally more in a thorough profile."""
    return settings(max_examples=count * settings().max_examples // BY_DEFAULT, **others)
