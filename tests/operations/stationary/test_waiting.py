"""Backward that comes to outputs which a loss leaves out, in the order in which it comes to them from a loss of all."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_osdp.operations.stationary import WaitingOutputs


class Chain:
    """Outputs, each made of the one before, and the order in which backward comes to them."""

    def __init__(self, number=4):
        self.outputs, self.order, self.made = WaitingOutputs(), [], []
        self.x = torch.ones(2, requires_grad=True)
        value = self.x
        for _ in range(number):
            value = value * 2
            self.made.append(value)
            place = self.outputs.add([value])
            value.register_hook(lambda _, place=place: self.order.append(place))

    def backward(self, loss, numbers=()):
        reach = self.outputs.reach(loss)
        reach.come_to(numbers)
        assert not reach.is_cut_off
        with self.outputs.agreed(reach.numbers):
            reach.loss.backward()
        return reach


def test_backward_comes_to_what_a_loss_leaves_out_with_zeros_and_in_the_same_order():
    whole, part = Chain(), Chain()
    whole.backward(whole.made[3].sum())
    assert whole.order == [4, 3, 2, 1]
    loss = part.made[1].sum()
    assert part.outputs.reach(loss).numbers == {1, 2}
    found = part.backward(loss, [1, 2, 3, 4])
    assert found.numbers == {1, 2, 3, 4}
    assert found.loss == loss
    assert part.order == whole.order
    assert part.x.grad.tolist() == [4.0, 4.0]


def test_a_loss_that_depends_on_nothing_takes_part():
    chain = Chain()
    chain.backward(torch.zeros(()), [3])
    assert chain.order == [3, 2, 1]
    assert chain.x.grad.tolist() == [0.0, 0.0]


def test_ranks_have_the_same_digest_where_they_reach_the_same_outputs():
    ours, theirs = Chain(), Chain()
    reach = ours.outputs.reach(ours.made[0].sum())
    assert reach.digest == theirs.outputs.reach(theirs.made[0].mean()).digest
    assert reach.digest != theirs.outputs.reach(theirs.made[1].sum()).digest
    assert 0 <= reach.digest < 2**31 - 1


def test_outputs_that_nobody_else_holds_wait_until_they_are_let_go():
    chain = Chain()
    chain.made.clear()
    chain.backward(chain.x.sum(), [4])
    assert chain.order == [4, 3, 2, 1]
    other = Chain()
    other.outputs.release()
    reach = other.outputs.reach(other.made[3].sum())
    assert reach.numbers == set()
    reach.come_to([4])
    assert reach.is_cut_off
    assert other.outputs.add([]) == 5
    other.outputs.forget()
    assert other.outputs.add([]) == 1


def test_one_tensor_may_be_what_several_calls_return():
    outputs, x = WaitingOutputs(), torch.ones(2, requires_grad=True)
    y = x * 2
    assert [outputs.add([y]), outputs.add([y])] == [1, 2]
    assert outputs.reach(y.sum()).numbers == {1, 2}


def test_nothing_waits_without_gradients_and_in_backward():
    outputs, x = WaitingOutputs(), torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert outputs.add([x]) is None
    seen = []
    y = x * 2
    y.register_hook(lambda gradient: seen.append(outputs.add([gradient])))
    torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert seen == [None]
    assert outputs.reach(y.sum()).has_slopes  # and those of other ranks have another digest
    outputs.release()
    assert not outputs.reach(y.sum()).has_slopes


def test_gathers_are_counted_alike_once_all_ranks_have_begun_anew():
    outputs = WaitingOutputs()
    assert [outputs.next_gather() for _ in range(17)] == [*range(1, 16), 1, 2]
    outputs.forget()
    assert outputs.next_gather() == 1


def test_only_what_is_agreed_is_agreed_and_only_within_the_backward():
    outputs = WaitingOutputs()
    with outputs.agreed({2}):
        assert [outputs.is_agreed(number) for number in (1, 2, None)] == [False, True, False]
    assert not outputs.is_agreed(2)


@pytest.mark.parametrize("from_outside", [True, False])
def test_what_a_checkpoint_recomputes_is_reached_from_outside_only(from_outside):
    outputs, x, seen = WaitingOutputs(), torch.ones(2, requires_grad=True), []

    def inside(value):
        made = value.exp()
        outputs.add([made])
        return made.sin()

    y = checkpoint(inside, x, use_reentrant=False)
    y.register_hook(seen.append)
    assert outputs.add([y]) == 2
    reach = outputs.reach(x.sum())
    reach.come_to([1, 2] if from_outside else [1])
    assert reach.is_cut_off is not from_outside
    if from_outside:
        assert reach.numbers == {1, 2}
        reach.loss.backward()
        assert [each.tolist() for each in seen] == [[0.0, 0.0]]
        assert x.grad.tolist() == [1.0, 1.0]
