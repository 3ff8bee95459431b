"""Actions, and their packed form."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_ds.pipelining import ALL, Action, Kind
from functional_ds.pipelining.schedules.action import MOST_MICROBATCHES, MOST_STAGES, packed, unpack

ACTIONS = st.builds(
    lambda kind, stage, j: Action(kind, stage, ALL if kind >= Kind.GATHER else j),
    st.sampled_from(Kind),
    st.integers(0, MOST_STAGES - 1),
    st.integers(0, MOST_MICROBATCHES - 1),
)


@given(st.lists(ACTIONS))
def test_packing_loses_nothing(actions: list[Action]) -> None:
    """unpack ∘ packed = id, up to the largest stages and micro-batches."""
    assert unpack(packed(actions)) == tuple(actions)


@given(ACTIONS)
def test_text_loses_nothing(action: Action) -> None:
    """Action.of ∘ str = id."""
    assert Action.of(str(action)) == action


@given(st.lists(ACTIONS))
def test_codes_are_in_the_order_of_actions(actions: list[Action]) -> None:
    """Sorting codes sorts actions."""
    assert unpack(np.sort(packed(actions))) == tuple(sorted(actions))


@pytest.mark.parametrize("text", ["", "F0", "0F", "0X1", "0F1 ", "0GATHER1", "-1F0", "0SEND0", "0F0F1"])
def test_text_that_is_no_action(text: str) -> None:
    """It is refused, and shown."""
    with pytest.raises(ValueError, match="is not an action") as error:
        Action.of(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("text", ["99999999999F0", "0F99999999999", f"{MOST_STAGES}GATHER"])
def test_text_with_numbers_that_no_code_holds(text: str) -> None:
    """It is refused, and shown."""
    with pytest.raises(ValueError, match=f"'{text}' is out of range: stages are 0 to 1048575, micro-batches 0 to 16777214"):
        Action.of(text)


@pytest.mark.parametrize(
    "action",
    [
        Action(Kind.F, -1, 0),
        Action(Kind.F, 0, -2),
        Action(Kind.F, 0),
        Action(Kind.GATHER, 0, 1),
        Action(Kind.F, MOST_STAGES, 0),
    ],
)
def test_numbers_that_no_code_holds(action: Action) -> None:
    """They are refused with their place."""
    with pytest.raises(ValueError, match="place 1: "):
        packed([Action(Kind.F, 0, 0), action])
