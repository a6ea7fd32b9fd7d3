"""The prefix cache that schemas are compared with, against brute force."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.authoring.extract.extraction import ELEMENT, shared_prefixes


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from([0, 1, 255, 256, 2**32 - 1]), max_size=6), max_size=12))
def test_shared_prefixes(lists):
    expected = []
    for number, one in enumerate(lists):
        lengths = [0]
        for other in lists[:number]:
            length = 0
            while length < min(len(one), len(other)) and one[length] == other[length]:
                length += 1
            lengths.append(length)
        expected.append(max(lengths))
    assert shared_prefixes([np.array(one, ELEMENT).tobytes() for one in lists]) == expected
