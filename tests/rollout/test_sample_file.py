"""Trajectories through a Parquet file: every bit comes back, and a file that is not one is
refused by name.
"""

import os
import re
import stat
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from megatron_rl_corr.engines.trajectory import MessageSpan, TopLogprobs
from megatron_rl_corr.rollout import SamplingParams, Support, Trajectory, VersionSpan, sample_file
from megatron_rl_corr.rollout.sample_columns import FORMAT, SCHEMA, Origin, Sample
from megatron_rl_corr.rollout.sample_file import (
    BATCH,
    SAMPLING,
    SavedBatch,
    read_batch,
    read_sampling,
    read_trajectories,
    samples_of_rows,
    write_trajectories,
)

ADDED = {"environment_reward", "routed_experts_bytes", "group", "row", "label", "reward_parts", "branch"}
ADDED |= {"began", "messages", "top_ids", "top_logprobs"}
ODD_NAN = torch.tensor([0x7FC01234], dtype=torch.int32).view(torch.float32)  # a NaN with a payload


def response(tokens, index=0, **options):
    """Prompt of 2; `tokens` response tokens, whose first log-prob is a NaN with a payload and
    whose last is -0.0.
    """
    logprobs = -torch.linspace(0.1, 7.3, tokens)
    if tokens:
        logprobs[:1], logprobs[-1] = ODD_NAN, -0.0
    half = tokens // 2
    spans = (VersionSpan("v1", 0, half), VersionSpan("v2", half, tokens))
    return Trajectory(
        prompt_index=index,
        sample_index=index + 1,
        prompt_ids=torch.tensor([1, 2**40 + index]),
        output_ids=torch.arange(tokens) + 150_000,
        rollout_logprobs=logprobs,
        finish_reason="abort" if tokens == 0 else "stop",
        weight_versions=spans,
        cached_tokens=1,
        server=f"http://rollout-{index}:30000",
        **options,
    )


def full(tokens, index=0):
    """A sample with everything that is known of one."""
    lengths = torch.arange(tokens, dtype=torch.int32) % 3 + 1
    return Sample(
        response(
            tokens,
            index,
            support=Support(torch.arange(int(lengths.sum()), dtype=torch.int32), lengths),
            routed_experts=torch.arange((tokens + 1) * 6, dtype=torch.int16).view(tokens + 1, 3, 2),
            turn_ids=torch.arange(tokens) // 2 - 1,
            top_logprobs=TopLogprobs(
                torch.arange(tokens * 3, dtype=torch.int32).view(tokens, 3 if tokens else 0),
                -torch.linspace(0.1, 7.3, tokens * 3).view(tokens, 3 if tokens else 0),
            ),
            environment_reward=0.3,
            branch=index + 2,
            began="edited",
            messages=(MessageSpan("user", 0), MessageSpan("assistant", 2, "stop"))[: 2 if tokens else 0],
        ),
        reward=0.1,
        loss_mask=torch.arange(tokens) % 2 == 0,
        train_logprobs=torch.full((tokens,), -1.5),
        advantages=torch.full((tokens,), 0.1),
        reward_parts={"math": 1.0, "format/tags": -0.1} if tokens else {},
        origin=Origin(812, 40 + index, {"answer": [17, None]}),
    )


BYTES = torch.tensor([0, 7, 255, 255] * 4, dtype=torch.uint8).view(4, 2, 2)

SAMPLES = [
    full(5),
    Sample(response(3, 1, routed_experts=BYTES)),
    Sample(response(0, 2)),
    full(0, 3),
    replace(full(4, 4), advantages=None, origin=Origin(0, 0)),
    Sample(response(1, 5), reward=float("nan")),
]


def bits(value):
    """The value as something that == compares bit for bit."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.contiguous().numpy().tobytes()
    if isinstance(value, (Sample, Trajectory, Support, TopLogprobs, Origin)):
        return {name: bits(of) for name, of in vars(value).items()}
    return repr(value) if isinstance(value, float) else value


def test_file_when_keys_are_more_than_a_row_group_may_have_then_it_has_several(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_file, "MOST_IDS", 20)
    keys = torch.arange(12, dtype=torch.int16).view(6, 1, 2)
    samples = [Sample(response(5, index, indexer_keys=keys)) for index in range(3)]
    path = write_trajectories(tmp_path / "step.parquet", samples)
    with pq.ParquetFile(path) as file:
        assert [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)] == [1, 1, 1]
    assert [bits(one) for one in read_trajectories(path)] == [bits(one) for one in samples]


@pytest.mark.parametrize("tokens_per_group", [1, 8, 1 << 18])
def test_file_when_read_back_then_every_bit_whatever_the_row_groups(tmp_path, tokens_per_group):
    path = write_trajectories(tmp_path / "step.parquet", iter(SAMPLES), tokens_per_group=tokens_per_group)
    read = list(read_trajectories(path))
    assert [bits(sample) for sample in read] == [bits(sample) for sample in SAMPLES]
    assert read[0].trajectory.rollout_logprobs[:1].view(torch.int32).item() == 0x7FC01234


@pytest.mark.parametrize(
    "some", [slice(0), slice(1, 2), slice(2, 3), slice(1)], ids=["none", "bare", "empty", "full"]
)
def test_file_when_all_rows_are_alike_then_read_back(tmp_path, some):
    samples = SAMPLES[some]
    path = write_trajectories(tmp_path / "step.parquet", samples)
    assert [bits(sample) for sample in read_trajectories(path)] == [bits(sample) for sample in samples]


def test_file_when_big_then_row_groups_by_tokens_and_any_of_them_can_be_read_alone(tmp_path):
    # With the prompts of 2 the samples have 7, 5, 2, 2, 6 and 3 tokens; a group ends with the
    # sample that reaches 7.
    path = write_trajectories(tmp_path / "step.parquet", SAMPLES, tokens_per_group=7)
    indexes = [[s.trajectory.prompt_index for s in read_trajectories(path, row_groups=[g])] for g in range(3)]
    assert indexes == [[0], [1, 2], [3, 4]]
    assert [s.trajectory.prompt_index for s in read_trajectories(path, row_groups=[3, 0])] == [5, 0]
    with pytest.raises(ValueError, match="row groups 0 to 3, got 4"):
        list(read_trajectories(path, row_groups=[4]))


def test_file_when_written_then_compressed_without_a_temporary_beside_it_and_readable_by_others(tmp_path):
    path = write_trajectories(tmp_path / "step.parquet", SAMPLES)
    assert os.listdir(tmp_path) == ["step.parquet"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    group = pq.ParquetFile(path).metadata.row_group(0)
    assert {group.column(i).compression for i in range(group.num_columns)} == {"ZSTD"}


def test_file_when_writing_fails_then_the_old_one_stays_and_nothing_else(tmp_path):
    path = write_trajectories(tmp_path / "step.parquet", SAMPLES[:1])
    before = path.read_bytes()

    def broken():
        yield SAMPLES[1]
        raise RuntimeError("the server went away")

    with pytest.raises(RuntimeError, match="went away"):
        write_trajectories(path, broken(), tokens_per_group=1)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["step.parquet"]


def test_file_when_its_folder_is_not_there_then_none_is_made(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_trajectories(tmp_path / "absent" / "step.parquet", SAMPLES)
    assert os.listdir(tmp_path) == []


def changed(tmp_path, change):
    """The path of a file whose table went through `change`."""
    table = change(pq.read_table(write_trajectories(tmp_path / "good.parquet", SAMPLES[:2])))
    path = tmp_path / "bad.parquet"
    pq.write_table(table, path)
    return path


def with_column(name, values):
    """A change of one column's values in both rows."""
    field = SCHEMA.field(name)
    return lambda table: table.set_column(SCHEMA.get_field_index(name), field, pa.array(values, field.type))


def spans(*bounds):
    return [{"version": "v", "start": start, "end": end} for start, end in bounds]


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda t: t.drop_columns(["output_ids"]), "bad.parquet has no column output_ids; it must be list<"),
        (lambda t: t.drop_columns(["advantages"]), "bad.parquet has no column advantages"),
        (
            lambda t: t.replace_schema_metadata({}),
            "bad.parquet holds no trajectories; this package reads version 1",
        ),
        (
            lambda t: t.replace_schema_metadata({FORMAT: b"2"}),
            "has trajectories of version 2; this package reads",
        ),
        (
            lambda t: t.set_column(0, "prompt_index", pa.array([1.5, 2.5])),
            "bad.parquet has double in column prompt_index; it must be int64",
        ),
        (
            with_column("output_ids", [[1] * 5, [1] * 2]),
            "bad.parquet, row 1: .* do not partition the 2 output_ids",
        ),
        (
            with_column("rollout_logprobs", [[-1] * 4, [-1] * 3]),
            "row 0: 5 output_ids have 4 rollout_logprobs",
        ),
        (with_column("loss_mask", [[True] * 5, [True]]), "row 1: 3 output_ids have 1 loss_mask"),
        (with_column("turn_ids", [[0] * 5, [0]]), "row 1: 3 output_ids have 1 turn_ids"),
        (with_column("turn_ids", [[0] * 5, [0, -2, 1]]), "row 1: turn_ids must be at least -1, got -2"),
        (
            with_column("weight_versions", [spans((0, 5)), spans((0, 1), (2, 3))]),
            "row 1: weight_versions .* partition",
        ),
        (
            with_column("weight_versions", [spans((0, 4)), spans((0, 3))]),
            "row 0: weight_versions .* partition the 5",
        ),
        (with_column("support_lengths", [[1] * 5, None]), "row 0: lengths that sum to 5 have 9 ids"),
        (
            with_column("support_lengths", [None, None]),
            "row 0: of support_ids and support_lengths, one is null",
        ),
        (
            with_column("routed_experts_shape", [[6, 3, 3], None]),
            r"row 0: 36 routed_experts .* shape \[6, 3, 3\]",
        ),
        (
            with_column("routed_experts_shape", [[12, 3, 1], None]),
            "row 0: 7 tokens have routed_experts of 12, not 6",
        ),
        (
            with_column("messages", [[{"role": "user", "start": 8, "ended": ""}], None]),
            r"row 0: messages start at \[8\], which is no order within the 7 tokens",
        ),
        (
            with_column("messages", [[{"role": "a", "start": at, "ended": ""} for at in (0, 5, 2)], None]),
            r"row 0: messages start at \[0, 5, 2\], which is no order within the 7 tokens",
        ),
    ],
)
def test_file_when_it_breaks_a_rule_then_error_names_file_row_and_rule(tmp_path, change, named):
    with pytest.raises(ValueError, match=named):
        list(read_trajectories(changed(tmp_path, change)))


def test_file_when_written_before_a_column_was_added_then_read_without_it(tmp_path):
    path = changed(tmp_path, lambda table: table.drop_columns(list(ADDED - {"routed_experts_bytes"})))
    read = list(read_trajectories(path))
    assert [sample.trajectory.environment_reward for sample in read] == [None, None]
    unknown = {"origin": None, "reward_parts": None}
    old = [
        replace(
            s,
            trajectory=replace(
                s.trajectory,
                environment_reward=None,
                branch=0,
                began="",
                messages=(),
                top_logprobs=None,
            ),
            **unknown,
        )
        for s in SAMPLES[:2]
    ]
    assert [bits(sample) for sample in read] == [bits(sample) for sample in old]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(7),
        SamplingParams(12, temperature=0.7, top_p=0.9, top_k=40, stop_token_ids=(3, 5), ignore_eos=True),
    ],
)
def test_file_when_the_sampling_is_given_then_it_is_read_back_beside_the_samples(tmp_path, sampling):
    path = write_trajectories(tmp_path / "a.parquet", [Sample(response(3))], sampling=sampling)
    assert read_sampling(path) == sampling and len(list(read_trajectories(path))) == 1
    assert read_sampling(write_trajectories(tmp_path / "b.parquet", [Sample(response(3))])) is None


@pytest.mark.parametrize("kept", ['{"max_new_tokens": 0}', '{"max_new_tokens": 1, "warmth": 2}', "{", "[1]"])
def test_sampling_when_it_is_none_then_error_names_the_file_and_the_key(tmp_path, kept):
    path = write_trajectories(tmp_path / "a.parquet", [Sample(response(3))])
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, SAMPLING: kept.encode()}), path)
    with pytest.raises(
        ValueError, match=rf"a\.parquet has a {SAMPLING.decode()} in its metadata that cannot be read"
    ):
        read_sampling(path)


def test_file_when_its_batch_is_given_then_it_is_read_back_and_another_kind_is_named(tmp_path):
    batch = SavedBatch(
        step=9,
        updates=2,
        replica=1,
        replicas=4,
        group_size=8,
        packed=True,
        num_turns=None,
        hf_checkpoint="/models/qwen",
    )
    path = write_trajectories(tmp_path / batch.file_name, [Sample(response(3))], batch=batch)
    assert path.name == "step_000009_replica1.parquet" and read_batch(path) == batch
    assert read_batch(write_trajectories(tmp_path / "b.parquet", [Sample(response(3))])) is None
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, BATCH: b'{"step": 1}'}), path)
    with pytest.raises(ValueError, match=rf"has a {BATCH.decode()} in its metadata that cannot be read"):
        read_batch(path)


def test_row_when_its_error_is_in_a_later_group_then_numbered_from_the_start_of_the_file(tmp_path):
    path = changed(tmp_path, with_column("reward", [0.5, 1.5]))
    table = pq.read_table(path)
    bad = with_column("loss_mask", [[True] * 5, [True]])(table)
    pq.write_table(bad, path, row_group_size=1)
    with pytest.raises(ValueError, match="row 1: 3 output_ids have 1 loss_mask"):
        list(read_trajectories(path))


def test_file_when_cut_short_or_damaged_then_error_names_it(tmp_path):
    path = write_trajectories(tmp_path / "step.parquet", SAMPLES)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="step.parquet is no Parquet file"):
        list(read_trajectories(path))
    path.write_bytes(whole[:4] + bytes(200) + whole[204:])
    with pytest.raises(ValueError, match="step.parquet, row group 0: cannot be read"):
        list(read_trajectories(path))


@pytest.mark.parametrize(
    "values, named",
    [
        ({"loss_mask": torch.ones(2, dtype=torch.bool)}, "3 output_ids have 2 loss_mask"),
        (
            {"advantages": torch.ones(3, dtype=torch.float64)},
            "advantages must be 1-d torch.float32, got .*64",
        ),
        ({"advantages": torch.ones(1, 3)}, "advantages must be 1-d torch.float32, got 2-d"),
    ],
)
def test_sample_when_its_tensors_do_not_fit_then_refused(values, named):
    with pytest.raises(ValueError, match=named):
        Sample(response(3), **values)


def test_samples_of_rows_when_rows_are_padded_then_each_response_has_the_values_that_predict_its_tokens():
    # Prompts of 2: the first response token is predicted at position 1.
    rows = torch.tensor([[9.0, 1.0, 2.0, 3.0, 9.0], [9.0, 4.0, 9.0, 9.0, 9.0], [9.0] * 5])
    trajectories = [response(3), response(1), response(0)]
    samples = samples_of_rows(
        trajectories, torch.tensor([0.5, 1.0, 0.0]), advantages=rows, loss_mask=rows > 1
    )
    assert [s.advantages.tolist() for s in samples] == [[1, 2, 3], [4], []]
    assert [s.loss_mask.tolist() for s in samples] == [[False, True, True], [True], []]
    assert [s.reward for s in samples] == [0.5, 1.0, 0.0] and samples[0].train_logprobs is None


def test_samples_of_rows_when_rows_do_not_fit_then_refused():
    with pytest.raises(ValueError, match="1 trajectories have 2 rows of advantages"):
        samples_of_rows([response(3)], advantages=torch.zeros(2, 5))
    with pytest.raises(ValueError, match="3 output_ids have 2 advantages"):
        samples_of_rows([response(3)], advantages=torch.zeros(1, 3))


def test_page_then_names_every_column_and_its_type():
    page = (Path(__file__).resolve().parents[2] / "docs/reference/sample_file.md").read_text()
    named = re.findall(
        "`([a-z_]+)`", " ".join(line.split("|")[1] for line in page.splitlines() if line[:3] == "| `")
    )
    assert named == SCHEMA.names
