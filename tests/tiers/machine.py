"""What the state machines of tiers share: rows of a few widths, and which of them a handle finds."""

import hypothesis.strategies as st

from tests.helpers.storage import found

WIDTHS = (0, 3, 200)
NAMES = range(40)
SOME = st.builds(
    lambda first, count: [(first + i) % len(NAMES) for i in range(count)],
    st.integers(0, len(NAMES) - 1),
    st.integers(1, 12),
)


def width_of(name):
    return WIDTHS[name % 3]


def rows(names, space):
    return {(space, name) for name in names}


class Handle:
    """A tier, and the rows that wait in it."""

    def __init__(self, tier):
        self.tier, self.waiting = tier, set()

    def get(self, names, space):
        """What is found of some rows, each compared with its value."""
        here = set()
        for width in WIDTHS:
            mine = [name for name in names if width_of(name) == width]
            here |= rows(found(self.tier, mine, width, space), space)
        return here
