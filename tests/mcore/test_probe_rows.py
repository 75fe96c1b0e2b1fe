"""The rows of a few texts: as short as these are, in as few microbatches as hold no more than
one of the run's.
"""

from argparse import Namespace

import pytest

from megatron_rl_corr.features.push_probe.rows import RowShapes, TextRows, keeps_shape

ROUND = [256] + [64] * 7


@pytest.mark.parametrize(
    ("shapes", "counts", "wanted"),
    [
        (RowShapes(8192, 1, 1, 64), ROUND, [([0], 256, 1), ([*range(1, 8)], 64, 7)]),
        (RowShapes(8192, 1, 1, 512), ROUND, [([*range(8)], 512, 8)]),
        (RowShapes(8192, 2, 4, 64), ROUND, [([0, 0, 0, 0], 256, 1), ([*range(1, 8), 1], 64, 2)]),
        (RowShapes(128, 2, 1, 64), [127, *ROUND[1:]], [([0], 128, 1), ([*range(1, 8), 1], 64, 4)]),
        (RowShapes(32, 8, 1, 64), [31] * 8, [([*range(8)], 32, 8)]),
        (RowShapes(32, 1, 1, 64), [31] * 2, [([0, 1], 32, 1)]),
        (RowShapes(256, 1, 1, 64), [64] * 8 + [48] * 32, [([*range(40)], 64, 4)]),
        (RowShapes(8192, 2, 1, 0), ROUND[:3], [([0, 1, 2, 0], 8192, 2)]),
        (RowShapes(8192, 2, 3, 0), ROUND[:1], [([0] * 6, 8192, 2)]),
    ],
)
def test_rows_then_each_text_has_one_that_is_long_enough_in_whole_passes(shapes, counts, wanted):
    rows = shapes.rows(counts)
    assert rows == [TextRows(tuple(places), length, size) for places, length, size in wanted]
    for one in rows:
        assert all(counts[place] - 1 <= one.length for place in one.places)
        assert len(one.places) % (one.micro_batch_size * shapes.multiple) == 0
        assert one.micro_batch_size * one.length <= max(
            shapes.micro_batch_size * shapes.seq_length, one.length
        )


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({}, False),
        ({"cuda_graph_impl": "none", "tp_comm_overlap": False}, False),
        ({"tp_comm_overlap": True}, True),
        ({"cuda_graph_impl": "local"}, True),
        ({"enable_cuda_graph": True}, True),
        ({"external_cuda_graph": True}, True),
    ],
)
def test_shape_when_megatron_has_graphs_or_buffers_of_it_then_it_is_kept(values, kept):
    assert keeps_shape(Namespace(**values)) == kept
