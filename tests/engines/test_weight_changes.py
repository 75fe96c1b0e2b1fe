"""Changes of weights: a server that gets them has, bit by bit, what a server has that gets everything."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron_rl_corr.engines.sglang import changes_loader
from megatron_rl_corr.engines.weight_changes import (
    CODE,
    PREFIX,
    ChangedTensor,
    ChangedValues,
    ChangesReceiver,
    end_of_stage,
    packed,
    shapes_of,
)


def between(old, new):
    """ChangedTensor of two versions of a tensor."""
    bits = {2: torch.int16, 4: torch.int32}[new.element_size()]
    return ChangedTensor.of(torch.where(old.view(bits) != new.view(bits), new, torch.nan))


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).tolist()


OLD = torch.tensor([[1.0, -2.0, 0.0, 3.5], [4.0, 5.0, 6.0, -0.0]])
NEW = torch.tensor([[1.0, 2.5, -0.0, 3.5], [4.0, 5.0, -6.0, 0.0]])


def test_changed_when_signs_of_zeros_differ_then_they_count():
    changed = between(OLD, NEW)
    assert changed.places.tolist() == [1, 2, 6, 7] and changed.places.dtype == torch.int32
    assert bits(changed.values) == bits(torch.tensor([2.5, -0.0, -6.0, 0.0]))
    assert changed.nbytes == 4 * (4 + 4)


class Model(torch.nn.Module):
    """Holds one half of w, transposed and in another dtype, and v in a row of a larger parameter."""

    def __init__(self, w, v):
        super().__init__()
        self.second = torch.nn.Parameter(w[:, 2:].t().contiguous().bfloat16())
        self.rows = torch.nn.Parameter(torch.stack([v, 9 * v]))
        self.calls = 0

    def load_weights(self, weights):
        self.calls += 1
        for name, tensor in weights:
            if name == "w":
                self.second.data.copy_(tensor.narrow(1, 2, 2).t())
            else:
                self.rows.data[0] = tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changes_when_loaded_then_the_model_is_the_one_that_everything_makes(dtype):
    old, new = OLD.to(dtype), NEW.to(dtype)
    v_old, v_new = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 7.0])
    model, expected = Model(old, v_old), Model(old, v_old)
    expected.load_weights([("w", new), ("v", v_new)])
    changes_loader.begin(model, header("1", "0", 1))
    model.load_weights(packed([("w", between(old, new)), ("v", between(v_old, v_new))], stage=0, number=0))
    model.load_weights(end_of_stage(stage=0, buckets=1))
    assert model.rl_corr_changes.version == "1"
    assert bits(model.second) == bits(expected.second) and bits(model.rows) == bits(expected.rows)
    assert model.rows[1].tolist() == [9, 18]
    model.load_weights([("w", old), ("v", v_old)])  # everything, by the same method
    assert bits(model.second) == bits(Model(old, v_old).second) and model.rl_corr_changes.version is None


def header(push, base, stages):
    told = {"push": push, "base": base, "stages": stages, "code": CODE}
    return [(json.dumps(told), torch.zeros(1))]


def test_changes_when_a_tensor_did_not_change_then_it_may_still_come_with_another():
    model = Model(OLD, torch.ones(2))
    changes_loader.begin(model, header("1", "0", 1))
    same = ChangedTensor.of(torch.full((2,), torch.nan))
    model.load_weights(packed([("w", between(OLD, NEW)), ("v", same)], stage=0, number=0))
    assert model.rows[0].tolist() == [1, 1] and bits(model.second) == bits(NEW[:, 2:].t().bfloat16())


@pytest.fixture
def receiver():
    receiver = ChangesReceiver()
    receiver.begin("1", "0", 2, CODE)
    return receiver


def bucket(stage, number):
    return packed([("w", between(OLD, NEW))], stage=stage, number=number)


@pytest.mark.parametrize(
    ("sent", "wrong"),
    [
        ([(0, 1)], "bucket 1 of stage 0 came where 0 was expected"),
        ([(0, 0), (0, 0)], "bucket 0 of stage 0 came where 1 was expected"),
        ([(1, 0), (0, 0), (1, 2)], "bucket 2 of stage 1 came where 1 was expected"),
        ([(2, 0)], "bucket 0 of stage 2 came where None was expected"),
    ],
    ids=["lost", "doubled", "reordered", "of nobody"],
)
def test_changes_when_a_bucket_is_lost_doubled_or_reordered_then_refused(receiver, sent, wrong):
    with pytest.raises(ValueError, match=wrong):
        for one in sent:
            receiver.load(bucket(*one), lambda weights: [*weights])
    assert receiver.version is None


def test_changes_when_the_last_bucket_is_lost_then_the_end_is_refused(receiver):
    receiver.load(bucket(0, 0), lambda weights: [*weights])
    with pytest.raises(ValueError, match="bucket 2 of stage 0 came where 1 was expected"):
        receiver.load(end_of_stage(stage=0, buckets=2), lambda weights: None)
    assert receiver.version is None


def test_changes_when_they_are_of_another_version_then_refused(receiver):
    for stage in (0, 1):
        receiver.load(end_of_stage(stage=stage, buckets=0), lambda weights: None)
    assert receiver.version == "1"
    for _ in range(2):  # also if they are sent again
        assert receiver.begin("2", "0", 2, CODE) == "changes of '0' do not fit weights that are '1'"
        with pytest.raises(ValueError, match="changes of '0' do not fit weights that are '1'"):
            receiver.load(bucket(0, 0), lambda weights: [*weights])
        assert receiver.version == "1"
    assert receiver.begin("2", "1", 2, CODE) is None and receiver.version is None
    receiver.load(bucket(0, 0), lambda weights: [*weights])


def test_changes_when_the_trainer_has_other_code_then_refused_with_both(receiver):
    receiver.begin("1", "0", 1, "0.0.9-12345678")
    with pytest.raises(ValueError, match=f"is {CODE}, and the trainer's is 0.0.9-12345678: install"):
        receiver.load(bucket(0, 0), lambda weights: [*weights])


def test_changed_values_when_copied_in_any_way_and_thread_then_nan_leaves_what_was_there():
    values = torch.tensor([[1.0, torch.nan, 2.0], [torch.nan, 4.0, torch.nan]]).as_subclass(ChangedValues)
    into, counts = torch.zeros(4, 3), torch.zeros(2, dtype=torch.int64)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: into.narrow(0, 0, 2).copy_(values)).result()
    into[2:] = values.flip(0).half()
    into[torch.tensor([2, 3]), 0] = torch.cat([values[1, :1], values[1, :1]])
    counts.copy_(torch.tensor([4, 5]))
    assert into.tolist() == [[1, 0, 2], [0, 4, 0], [0, 4, 0], [1, 0, 2]] and counts.tolist() == [4, 5]
    assert type(into) is torch.Tensor
    whole = torch.empty_like(values).copy_(values)  # still of changes
    assert type(whole) is ChangedValues and whole.isnan().sum() == 3


@pytest.mark.parametrize(
    "load",
    [
        lambda into, values: into.fill_(values[0].item()),
        lambda into, values: into.index_copy_(0, torch.tensor([0, 1]), values),
        lambda into, values: into.add_(values),
    ],
    ids=["item", "index_copy_", "add_"],
)
def test_changed_values_when_a_loader_does_not_copy_them_then_refused_by_name(load, request):
    into, values = torch.zeros(2), torch.tensor([torch.nan, 1.0]).as_subclass(ChangedValues)
    with pytest.raises(ValueError, match=f"a loader uses {request.node.callspec.id}, by which changes"):
        load(into, values)
    assert into.tolist() == [0, 0]


def test_packed_when_dtypes_differ_then_places_and_values_of_each():
    both = packed(
        [("w", between(OLD, NEW)), ("b", between(OLD.bfloat16(), NEW.bfloat16()))], stage=3, number=7
    )
    assert [tensor.dtype for _, tensor in both] == [torch.int32, torch.float32, torch.int32, torch.bfloat16]
    assert shapes_of(both) == {"w": [2, 4], "b": [2, 4]} and shapes_of(end_of_stage(stage=0, buckets=1)) == {}
    with pytest.raises(ValueError, match="whole weights came where changes were expected"):
        shapes_of([*both, ("w", OLD)])
    told = json.loads(both[0][0].removeprefix(PREFIX))
    assert told == {"stage": 3, "number": 7, "parts": 2, "tensors": [["w", [2, 4], 4]]}


def named(tensors, **told):
    return PREFIX + json.dumps({"stage": 0, "number": 0, "parts": 1, "tensors": tensors} | told)


ONE, PLACE = torch.ones(1), torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("name", "places", "values", "wrong"),
    [
        (named([["w", [2, 4], 1]]), PLACE - 1, ONE, "a place that its weight does not have"),
        (named([["w", [2, 4], 1]]), PLACE + 8, ONE, "a place that its weight does not have"),
        (named([["w", [2, 4], 1], ["v", [2], 1]]), torch.tensor([0, 2]), torch.ones(2), "a place that its"),
        (named([["w", [2, 4], 0]]), PLACE, ONE, "tells of 0 values, and brings"),
        (named([["w", [2, 4], 2]]), PLACE, ONE, "tells of 2 values, and brings"),
        (named([["w", [2, 4], -1]]), torch.zeros(3, dtype=torch.int32), torch.ones(3), "a count or size"),
        (named([["w", [2, 4], 1]], number=None), PLACE, ONE, "a count or size"),
        (named([["w", [2, 4], 1]], parts=True), PLACE, ONE, "a count or size"),
        (named([["w", [2, -4], 1]]), PLACE, ONE, "a count or size"),
        (named([["w", [2**40], 1]]), PLACE, ONE, "a count or size"),
        (
            named([["w", [1], 2]]),
            torch.zeros(2, dtype=torch.int32),
            torch.ones(2),
            "more changes of a weight",
        ),
        (named([["w", [2, 4], 1]]), PLACE.reshape(1, 1), ONE, "tells of 1 values, and brings"),
        ("w", PLACE, ONE, "whole weights came where changes were expected"),
    ],
)
def test_bucket_when_its_counts_are_not_of_its_tensors_then_refused_before_the_model_is_asked(
    receiver, name, places, values, wrong
):
    with pytest.raises(ValueError, match=wrong):
        receiver.load([(name, places), (PREFIX + "values", values)], lambda weights: pytest.fail("loaded"))
    receiver.load(bucket(0, 0), lambda weights: [*weights])  # the stage's next bucket is what it was


def test_bucket_when_it_has_a_weight_twice_then_no_memory_is_made_for_either():
    tensors = [["w", [2**30, 2**30], 0], ["w", [2, 4], 1]]
    with pytest.raises(ValueError, match="changes of one weight twice"):
        shapes_of([(named(tensors), PLACE), (PREFIX + "values", ONE)])


@pytest.mark.parametrize("stages", [0, -1, 2**40, None, "2", True])
def test_push_when_it_comes_from_an_absurd_number_of_stages_then_refused(stages):
    receiver = ChangesReceiver()
    assert "a push comes from 1 to 4096 stages" in receiver.begin("1", "0", stages, CODE)
    with pytest.raises(ValueError, match="a push comes from 1 to 4096 stages"):
        receiver.load(bucket(0, 0), lambda weights: [*weights])
