from __future__ import annotations

import pytest
import torch

from agilerl.training.llm.feeding import ResetStream, num_rows, open_readers, rows_per_epoch, settle
from tests.training.agents import make_env


class OneRuntime:
    dp_size = 1

    def sum(self, values):
        return list(values)


class ResetOnly:
    """An env that a user might write: rows 1, 2, 3 ... of growing length, three at a time."""

    def __init__(self, length: int | None = 7, batch: int = 3) -> None:
        self.served, self.batch, self.length = 0, batch, length
        if length is not None:
            self.__class__ = _Sized

    def reset(self):
        ids = [torch.full((1 + n % 4,), n + 1) for n in range(self.served, self.served + self.batch)]
        self.served += self.batch
        width = max(len(one) for one in ids)
        padded = torch.stack([torch.nn.functional.pad(one, (width - len(one), 0)) for one in ids])
        return {"input_ids": padded, "attention_mask": (padded > 0).long(), "prompt_lengths": [0] * self.batch}


class _Sized(ResetOnly):
    def __len__(self):
        return self.length


def ids(batch) -> list[int]:
    return [int(row[mask.bool()][0]) for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]


def test_batches_of_an_env_with_reset_only_are_gathered_and_cut():
    (reader,) = open_readers(ResetOnly(), 1, dp_size=1)
    assert ids(reader.take(4)) == [1, 2, 3, 4]
    batch = reader.take(4)
    assert ids(batch) == [5, 6, 7]  # an epoch's remainder
    assert reader.epoch == 1
    assert num_rows(batch) == 3 == len(batch["prompt_lengths"])
    assert ids(reader.take(2)) == [8, 9]
    assert torch.equal(batch["attention_mask"].sum(1), torch.tensor([1, 2, 3]))


def test_several_readers_share_one_stream_and_keep_their_places():
    stream = ResetStream(ResetOnly(length=None), dp_size=1)
    fast, slow = stream.reader(), stream.reader()
    assert ids(fast.take(5)) == ids(slow.take(2)) + ids(slow.take(3))
    fast.take(6)
    heir = slow.fork()
    assert ids(heir.take(2)) == ids(slow.take(2)) == [6, 7]
    state = heir.state_dict()
    ahead = ids(heir.take(3))
    heir.load_state_dict(state)
    assert ids(heir.take(3)) == ahead
    for reader in (slow, heir):
        reader.close()
    fast.take(1)
    with pytest.raises(ValueError, match="cannot be read twice"):
        stream.read(0, 1)
    with pytest.raises(ValueError, match="another kind of env"):
        fast.load_state_dict({"epoch": 1})


def test_rows_of_an_epoch():
    runtime = OneRuntime()
    assert rows_per_epoch(make_env(train=20), runtime) == 20
    assert rows_per_epoch(ResetOnly(), runtime) == 7
    assert rows_per_epoch(ResetOnly(length=None), runtime) is None


def test_one_reader_moves_the_env_and_several_do_not():
    env = make_env(train=20)
    (reader,) = open_readers(env, 1, dp_size=1)
    first = reader.take(20)
    assert env.num_epochs == 1
    env.reset(reset_dataloaders=True)
    env = make_env(train=20)
    one, two = open_readers(env, 2, dp_size=1)
    assert one.take(20)["prompt"] == two.take(20)["prompt"] == first["prompt"]
    assert env.num_epochs == 0
    one.take(5)
    settle(env, one)
    assert (env.num_epochs, env.reader.position) == (1, 5)


def test_a_batch_without_ids_is_named():
    with pytest.raises(ValueError, match="labels"):
        num_rows({"labels": 3})
