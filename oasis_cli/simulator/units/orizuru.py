"""Orizuru (§IV-D, Fig. 10): two tournament trees over shared leaves pop a token's k largest and k smallest values.

The trees work on all tokens of a window at once; what a comparator does for one token it does for each.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from oasis_cli.simulator.units.outlier_set import OutlierSet


@dataclass(frozen=True)
class Pops:
    """What the two trees popped.

    Attributes:
        largest: channels, int64 [M, k], in the order in which the max tree popped them.
        smallest: channels, int64 [M, k], of the min tree.
        comparisons: comparisons for each token, by the step they belong to: {"build": …, "upkeep": …}.
    """

    largest: Tensor
    smallest: Tensor
    comparisons: dict[str, int]

    def outliers(self) -> OutlierSet:
        """Largest first, then smallest; a channel that both trees popped counts once."""
        twice = (self.smallest[:, :, None] == self.largest[:, None, :]).any(2)
        valid = torch.cat((torch.ones_like(twice), ~twice), 1)
        return OutlierSet(torch.cat((self.largest, self.smallest), 1), valid)


@dataclass
class _Tree:
    """One tree: the channel that wins at each node, level by level, and which channels are still there.

    `winners[l]` is int64 [M, P >> l]: level 0 holds the leaves, the last level the root. `comparisons` counts those of
    one token.
    """

    values: Tensor
    available: Tensor
    winners: list[Tensor]
    smallest: bool
    comparisons: int = 0

    def right_wins(self, left: Tensor, right: Tensor) -> Tensor:
        """One comparator a node: ties go left, a popped or padded channel loses to any other."""
        self.comparisons += left.shape[1]
        a, b = self.values.gather(1, left), self.values.gather(1, right)
        better = b < a if self.smallest else b > a
        return self.available.gather(1, right) & (better | ~self.available.gather(1, left))

    def build_above(self, first_level: Tensor) -> None:
        """Play every level from the second on; the first is given, since both trees share its comparisons."""
        leaves = self.winners[0]
        self.winners.append(torch.where(first_level, leaves[:, 1::2], leaves[:, 0::2]))
        while self.winners[-1].shape[1] > 1:
            left, right = self.winners[-1][:, 0::2], self.winners[-1][:, 1::2]
            self.winners.append(torch.where(self.right_wins(left, right), right, left))

    def pop(self) -> Tensor:
        """Take the winner out, int64 [M, 1], and play its path to the root again: one comparison a level."""
        winner = self.winners[-1].clone()
        self.available.scatter_(1, winner, False)
        for level in range(1, len(self.winners)):
            node = winner >> level
            left = self.winners[level - 1].gather(1, 2 * node)
            right = self.winners[level - 1].gather(1, 2 * node + 1)
            self.winners[level].scatter_(1, node, torch.where(self.right_wins(left, right), right, left))
        return winner


def search_outliers(x: Tensor, k: int) -> Pops:
    """Pop the k largest and the k smallest values of every token from the two trees.

    K is padded to a power of two P with channels that are not there. A comparator with a padded input switches as
    any other, so the counts are those of P: 1.5·P - 2 to build both trees and log2 P for each of the 2k pops.

    Args:
        x: activations, float32 [M, K]; a token that is not finite gives some channels.
        k: pops from each tree, at most K/2.

    Raises:
        ValueError: if k does not fit K.
    """
    M, K = x.shape
    _check_count(k, K)
    if k == 0:
        nothing = torch.empty(M, 0, dtype=torch.int64)
        return Pops(nothing, nothing, {"build": 0, "upkeep": 0})
    padded = 1 << (K - 1).bit_length()
    values = torch.nn.functional.pad(x, (0, padded - K))
    there = (torch.arange(padded) < K).expand(M, padded)
    # One comparison a pair of leaves serves both trees, as "greater" and as "less": on a tie neither holds, and both
    # trees go left. The min tree must not take "not greater", which would send its ties to the right.
    left, right = values[:, 0::2], values[:, 1::2]
    first_level = {False: right > left, True: right < left}
    leaves = torch.arange(padded).expand(M, padded)
    popped, build, upkeep = [], left.shape[1], 0
    for smallest in (False, True):
        tree = _Tree(values, there.clone(), [leaves], smallest)
        tree.build_above(first_level[smallest] & there[:, 1::2])
        build, built = build + tree.comparisons, tree.comparisons
        popped.append(torch.cat([tree.pop() for _ in range(k)], 1))
        upkeep += tree.comparisons - built
    return Pops(popped[0], popped[1], {"build": build, "upkeep": upkeep})


def count_comparisons(K: int, k: int) -> dict[str, int]:
    """Comparisons of one token, as `search_outliers` makes them: none for k = 0, when no tree is built."""
    if k == 0:
        return {"build": 0, "upkeep": 0}
    padded = 1 << (K - 1).bit_length()
    shared, inner = padded // 2, padded // 2 - 1
    return {"build": shared + 2 * inner, "upkeep": 2 * k * (padded.bit_length() - 1)}


def sort_outliers(x: Tensor, k: int) -> Pops:
    """The channels of `search_outliers` by sorting: faster for whole windows, and held equal to it by the tests.

    Args:
        x: activations, float32 [M, K].
        k: as for `search_outliers`.

    Raises:
        ValueError: if k does not fit K.
    """
    _check_count(k, x.shape[1])
    # stable: equal values keep the order of their channels, which is the trees' rule for ties
    largest = x.sort(dim=1, descending=True, stable=True).indices[:, :k]
    smallest = x.sort(dim=1, stable=True).indices[:, :k]
    return Pops(largest, smallest, count_comparisons(x.shape[1], k))


def _check_count(k: int, K: int) -> None:
    if k < 0 or 2 * k > K:
        raise ValueError(f"k = {k} pops a tree do not fit K = {K}")
