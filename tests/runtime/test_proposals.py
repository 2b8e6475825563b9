"""What rank 0 proposes takes effect on all ranks at the same exchange, however late ranks are."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from distmon.runtime.proposals import Proposals

EXCHANGES = 18


@dataclass
class _Rank:
    """One rank: what has arrived there, what it acknowledged, what took effect, where it waited."""

    proposals: Proposals[int] = field(default_factory=Proposals)
    arrived: int = 0
    acknowledged: dict[int, bool] = field(default_factory=dict)
    effects: dict[int, int] = field(default_factory=dict)
    waited: list[int] = field(default_factory=list)


def _simulate(wanted: dict[int, int], late: list[list[int]]) -> tuple[list[_Rank], dict[int, int]]:
    """Exchange `number` arrives on a rank `late[rank][number]` exchanges after it was launched.

    Rank 0 wants what `wanted` has for an exchange, and proposes it unless another one is open.
    Returns the ranks, and what was proposed.
    """
    ranks, proposed = [_Rank() for _ in late], dict[int, int]()
    is_open = False

    def arrive(rank: _Rank, upto: int) -> None:
        for number in range(rank.arrived + 1, upto + 1):
            all_acknowledge = all(other.acknowledged[number] for other in ranks)
            rank.proposals.arrive(number, proposed.get(number), all_acknowledge)
            rank.arrived = number

    for number in range(1, EXCHANGES + 1):
        for rank, delays in zip(ranks, late, strict=True):
            there = [n for n in range(1, number) if n + delays[n] < number]
            # In order: one that is late holds up those after it.
            upto = rank.arrived
            while upto + 1 in there:
                upto += 1
            arrive(rank, upto)
            if rank.proposals.must_wait(number):
                rank.waited.append(number)
                arrive(rank, number - 1)  # all ranks have launched it
            if (effect := rank.proposals.take(number)) is not None:
                rank.effects[number] = effect
                is_open &= rank is not ranks[0]
            rank.acknowledged[number] = rank.proposals.known is not None
            if rank is ranks[0] and number in wanted and not is_open:
                proposed[number], is_open = wanted[number], True
    return ranks, proposed


delays = st.lists(st.integers(0, 5), min_size=EXCHANGES + 1, max_size=EXCHANGES + 1)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    wanted=st.dictionaries(st.integers(1, EXCHANGES), st.integers(1, 9), max_size=8),
    late=st.lists(delays, min_size=1, max_size=4),
)
def test_all_ranks_change_at_the_same_exchange(
    wanted: dict[int, int], late: list[list[int]]
) -> None:
    ranks, proposed = _simulate(wanted, late)
    first = min(proposed, default=EXCHANGES)
    for rank in ranks:
        assert rank.effects == ranks[0].effects
        assert [*rank.effects.values()] == [*proposed.values()][: len(rank.effects)]
        # Nothing is waited for before something was proposed.
        assert all(number > first for number in rank.waited)
    # It is in effect as soon as the slowest rank knows of it, and never later than 7 exchanges on.
    assert len(ranks[0].effects) >= sum(number + 8 <= EXCHANGES for number in proposed)


def test_ranks_that_are_in_time_change_two_exchanges_later_and_wait_for_nothing() -> None:
    in_time = [0] * (EXCHANGES + 1)
    ranks, _ = _simulate({3: 7, 4: 8, 5: 8}, [in_time, in_time, in_time])
    for rank in ranks:
        assert rank.effects == {5: 7, 7: 8}
        assert not rank.waited


def test_a_rank_that_is_late_delays_the_change_for_all() -> None:
    in_time, late = [0] * (EXCHANGES + 1), [3] * (EXCHANGES + 1)
    ranks, _ = _simulate({3: 7}, [in_time, late])
    assert [rank.effects for rank in ranks] == [{8: 7}] * 2
    assert not any(number < 5 for rank in ranks for number in rank.waited)
