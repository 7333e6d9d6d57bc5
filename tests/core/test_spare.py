import threading

import torch

from torchcache2.core.memory import SpareMemory

SIZE = 1 << 20


def test_memory_is_lent_again_when_nothing_has_it():
    spare = SpareMemory()
    first = spare.empty(SIZE).data_ptr()
    assert spare.empty(SIZE).data_ptr() == first
    assert spare.empty(SIZE // 2).data_ptr() == first
    assert len(spare.empty(SIZE // 2)) == SIZE // 2
    assert len(spare.empty(2 * SIZE)) == 2 * SIZE


def test_memory_that_something_has_is_not_lent():
    holders = [
        lambda tensor: tensor,
        lambda tensor: tensor[5:9],
        lambda tensor: tensor.view(torch.float32).view(-1, 4),
        lambda tensor: tensor.numpy()[1:],
    ]
    spare = SpareMemory()
    for make in holders:
        held = spare.empty(SIZE).fill_(7)
        before, held = held.data_ptr(), make(held)
        other = spare.empty(SIZE).fill_(8)
        assert other.data_ptr() != before
        assert bytes(torch.as_tensor(held).view(torch.uint8).flatten().tolist()).count(8) == 0


def test_threads_have_their_own_memory():
    spare, found = SpareMemory(), []
    mine = spare.empty(SIZE).data_ptr()
    thread = threading.Thread(target=lambda: found.append(spare.empty(SIZE)))
    thread.start()
    thread.join()
    assert found[0].data_ptr() != mine
