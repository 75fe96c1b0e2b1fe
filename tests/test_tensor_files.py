"""Results come back as they were written: every number type and shape, also from several files."""

import torch

from tests import tensor_files


def test_load_then_what_was_saved(tmp_path):
    shared = torch.arange(7, dtype=torch.bfloat16)
    results = {
        "a": [torch.tensor(True), torch.tensor([True, False, True]), torch.empty(0, 3), torch.tensor(2**40)],
        ("b", 1): (shared, shared.view(1, 7), torch.randn(3, 5).t(), torch.nn.Parameter(torch.ones(2))),
        "c": [1.5, None],
    }
    tensor_files.save(results, tmp_path / "one")
    tensor_files.save([torch.ones(1)], tmp_path / "two")
    tensor_files.save(
        tensor_files.Files([[str(tmp_path / "one")], [str(tmp_path / "two")] * 2]), tmp_path / "all"
    )
    found, [[again], [ones, more]] = tensor_files.load(tmp_path / "one"), tensor_files.load(tmp_path / "all")
    for one in (found, again):
        assert list(one) == list(results) and one["c"] == [1.5, None]
        pairs = zip([*one["a"], *one["b", 1]], [*results["a"], *results["b", 1]], strict=True)
        assert all(got.dtype == wanted.dtype and torch.equal(got, wanted) for got, wanted in pairs)
    found["a"][1][0] = False  # a view of the file, which nobody else sees
    assert tensor_files.load(tmp_path / "one")["a"][1][0] and torch.equal(
        ones[0] + more[0], torch.tensor([2.0])
    )
