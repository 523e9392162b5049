import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_osdp.profiler import LiveBytes

RESIZE = torch.UntypedStorage.resize_


def test_counts_what_operations_return_until_it_is_freed():
    with LiveBytes("cpu") as live:
        kept = torch.zeros(100)
        temporary = torch.zeros(50)
        assert live.current_bytes == 600
        del temporary
        assert live.current_bytes == 400
        again = kept + 1
    assert live.current_bytes == 800
    assert live.peak_bytes == 800
    del kept, again
    assert live.current_bytes == 0


def test_past_a_limit_an_operation_fails_as_if_memory_ran_out():
    with LiveBytes("cpu", memory_limit_bytes=600) as live:
        kept = torch.zeros(100)
        with pytest.raises(MemoryError, match="live tensors take 800 B, the limit is 600 B"):
            kept + 1
        assert live.current_bytes == 400
        storage = torch.zeros(50).untyped_storage()
        with pytest.raises(MemoryError, match="live tensors take 604 B"):
            storage.resize_(204)
    assert len(torch.zeros(1000)) == 1000  # not active


def test_the_peak_sees_temporaries_inside_an_expression():
    with LiveBytes("cpu") as live:
        result = (torch.ones(100) * 2).sum()
    assert live.peak_bytes == 800
    assert live.current_bytes == result.untyped_storage().nbytes()


def test_views_and_writes_in_place_add_nothing():
    with LiveBytes("cpu") as live:
        tensor = torch.zeros(10, 10)
        views = [tensor.T, tensor[2:], tensor.view(-1), tensor.detach(), tensor.expand(3, 10, 10)]
        tensor.add_(1)
        F.relu_(views[1])
    assert live.current_bytes == live.peak_bytes == 400


def test_a_view_keeps_its_whole_storage():
    with LiveBytes("cpu") as live:
        view = torch.zeros(1000)[:1]
    assert view.numel() == 1
    assert live.current_bytes == 4000


def test_resizing_a_storage_is_counted():
    with LiveBytes("cpu") as live:
        tensor = torch.zeros(100)
        tensor.untyped_storage().resize_(0)
        assert live.current_bytes == 0
        tensor.untyped_storage().resize_(1200)
        assert live.current_bytes == 1200
    assert live.peak_bytes == 1200
    assert torch.UntypedStorage.resize_ is RESIZE


def test_tracks_tensors_that_were_there_before():
    tensor = torch.zeros(100)
    aliases = [tensor, tensor.view(10, 10), tensor[:1]]
    with LiveBytes("cpu") as live:
        assert live.track(aliases) == 400
        assert live.track([tensor]) == 0
        live.reset_peak()
        del tensor, aliases
        assert (live.current_bytes, live.peak_bytes) == (0, 400)
        live.reset_peak()
        assert live.peak_bytes == 0


def test_what_is_left_out_counts_neither_itself_nor_by_its_views():
    kept = torch.zeros(100)
    with LiveBytes("cpu") as live:
        live.track([kept])
        live.leave_out([kept])
        live.reset_peak()
        view = kept[:10].detach()
        other = view + 1
        assert live.current_bytes == live.peak_bytes == other.nbytes


def test_an_address_used_again_is_a_new_storage():
    with LiveBytes("cpu") as live:
        for size in (10, 20, 30):
            tensor = torch.zeros(size)
            assert live.current_bytes == 4 * size
            del tensor
    assert live.peak_bytes == 120


def test_counts_backward_too():
    weight = torch.zeros(100, requires_grad=True)
    with LiveBytes("cpu") as live:
        (weight * 2).sum().backward()
    assert live.current_bytes == 400  # the gradient
    assert live.peak_bytes >= 400


def test_other_devices_and_layouts_do_not_count():
    with LiveBytes("cpu") as live:
        kept = torch.empty(100, device="meta") + 1
        assert live.current_bytes == 0
    assert live.track([kept, torch.eye(3).to_sparse()]) == 0


def test_fake_tensors_count_as_the_bytes_they_stand_for():
    with FakeTensorMode(), LiveBytes("cpu") as live:
        tensor = torch.empty(2**40, dtype=torch.float16)
        view = tensor[:]
        other = tensor + view
        assert live.current_bytes == 2**42
        del tensor, view
        assert live.current_bytes == other.untyped_storage().nbytes()
        other.untyped_storage().resize_(8)
    assert live.current_bytes == 8
    assert live.peak_bytes == 2**42


def test_is_active_only_while_entered():
    live = LiveBytes("cpu")
    assert not live.is_active
    with live:
        assert live.is_active
    assert not live.is_active


def test_can_be_entered_again_and_goes_on_counting():
    live = LiveBytes("cpu")
    with live:
        first = torch.zeros(100)
    uncounted = torch.zeros(100)
    with live:
        second = torch.zeros(100)
        assert live.current_bytes == 800
        uncounted.add_(1)  # now it is seen
        assert live.current_bytes == 1200
    del first, second
    assert live.current_bytes == 400


def test_can_be_entered_inside_itself_and_inside_another():
    outer, inner = LiveBytes("cpu"), LiveBytes("cpu")
    with outer:
        tensor = torch.zeros(100)
        with outer, inner:
            tensor.untyped_storage().resize_(800)
            other = torch.zeros(10)
        assert outer.is_active
        assert not inner.is_active
        tensor.untyped_storage().resize_(0)
    assert not outer.is_active
    assert other.sum() == 0
    assert outer.current_bytes == 40
    assert inner.current_bytes == 40
    assert torch.UntypedStorage.resize_ is RESIZE


def test_an_error_inside_leaves_no_trace():
    live = LiveBytes("cpu")
    with pytest.raises(ZeroDivisionError), live:
        1 / 0  # noqa: B018
    assert not live.is_active
    assert torch.UntypedStorage.resize_ is RESIZE


def test_one_may_be_left_before_another_that_was_entered_after_it():
    outer, inner = LiveBytes("cpu"), LiveBytes("cpu")
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert inner.is_active
    assert not outer.is_active
    inner.__exit__(None, None, None)
    assert torch.UntypedStorage.resize_ is RESIZE


def test_what_is_compiled_whole_runs_as_eager_code_while_it_is_counted():
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    double = torch.compile(lambda x: x * 2, backend=backend, fullgraph=True)
    with LiveBytes("cpu") as live:
        assert double(torch.ones(100)).sum() == 200
    assert live.peak_bytes >= 800
    assert not compiled
    assert double(torch.ones(100)).sum() == 200
    assert compiled
