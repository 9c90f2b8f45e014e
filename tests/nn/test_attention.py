"""Who may look at whom."""

import numpy as np
import pytest

from switchjax.nn.attention import visible

# Two words of one document, one of another, two places of padding.
QUERIES = np.array([[1, 1, 2, 0, 0]])
KEYS = np.array([[1, 2, 2, 0]])


@pytest.mark.parametrize(
    ("padding_sees_real", "rows"),
    [
        (False, ["1000", "1000", "0110", "0001", "0001"]),
        (True, ["1000", "1000", "0110", "1110", "1110"]),
    ],
)
def test_padding_sees_padding_or_all_that_is_real(padding_sees_real, rows):
    """Real queries see the same either way."""
    seen = visible(QUERIES, KEYS, causal=False, padding_sees_real=padding_sees_real)
    np.testing.assert_array_equal(seen[0], [[c == "1" for c in row] for row in rows])


def test_later_keys_are_hidden_from_padding_too():
    seen = visible(QUERIES, QUERIES, causal=True, padding_sees_real=True)
    rows = ["10000", "11000", "00100", "11100", "11100"]
    np.testing.assert_array_equal(seen[0], [[c == "1" for c in row] for row in rows])
