"""Tests of the corpus: a stable, disjoint split; batches that any ranks can resume; byte models."""

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.stdlib_corpus import (
    ByteModel,
    is_held_out,
    read_corpus,
    source_files,
    spread_windows,
    training_batch,
)


def text_of(data: bytes) -> torch.Tensor:
    """Returns bytes as a 1-D uint8 tensor."""
    return torch.tensor(list(data), dtype=torch.uint8)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small standard library, with what must be left out; each file holds its own path."""
    left_out = ["test/a.py", "json/tests/a.py", "site-packages/a.py", "dist-packages/a/b.py"]
    for path in [*(f"module{i}.py" for i in range(40)), "json/a.py", "notes.txt", *left_out]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    return tmp_path


def test_split_depends_on_the_path_alone() -> None:
    # Known values: Python's own hash() of a string differs from process to process.
    paths = ["abc.py", "calendar.py", "collections/abc.py", "copy.py", "json/decoder.py", "os.py"]
    held_out = ["calendar.py", "collections/abc.py", "copy.py"]
    assert [path for path in paths if is_held_out(path)] == held_out


def test_source_files_are_sorted_and_without_tests_and_packages(library: Path) -> None:
    names = ["json/a.py", *(f"module{i}.py" for i in range(40))]
    assert source_files(library) == sorted(names)


def test_corpus_holds_every_file_once(library: Path) -> None:
    corpus = read_corpus(library)
    training = bytes(corpus.training.tolist()).split(b"\x00")[1:]
    held_out = bytes(corpus.held_out.tolist()).split(b"\x00")[1:]
    assert training == sorted(training)
    assert held_out == sorted(held_out)
    assert sorted(training + held_out) == [path.encode() for path in source_files(library)]
    assert all(is_held_out(path.decode()) for path in held_out)
    assert not any(is_held_out(path.decode()) for path in training)


def test_corpus_of_this_python_holds_out_about_a_tenth() -> None:
    corpus = read_corpus()
    share = len(corpus.held_out) / (len(corpus.held_out) + len(corpus.training))
    assert 0.05 < share < 0.2
    assert len(corpus.training) > 1_000_000


def test_corpus_without_sources_names_the_directory(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=f"{tmp_path}.*sources of its library"):
        read_corpus(tmp_path)


def test_batch_is_a_function_of_seed_and_step() -> None:
    text = torch.arange(200, dtype=torch.uint8)  # each byte tells where it is from
    kwargs = {"sequences": 5, "length": 7}
    batch = training_batch(text, step=3, seed=1, **kwargs)
    assert batch.shape == (5, 8)
    assert torch.equal(batch, batch[:, :1] + torch.arange(8))
    torch.manual_seed(99)  # must not matter
    assert torch.equal(batch, training_batch(text, step=3, seed=1, **kwargs))
    assert not torch.equal(batch, training_batch(text, step=4, seed=1, **kwargs))
    assert not torch.equal(batch, training_batch(text, step=3, seed=2, **kwargs))


def test_windows_reach_over_the_text_without_overlap() -> None:
    text = torch.arange(103, dtype=torch.uint8)
    windows = spread_windows(text, count=10, length=9)
    assert len(windows.unique()) == windows.numel() == 100
    with pytest.raises(ValueError, match="at least 110 bytes"):
        spread_windows(text, count=10, length=10)


@given(data=st.binary(min_size=3, max_size=40), window=st.binary(min_size=2, max_size=9))
def test_byte_model_scores_a_window_byte_by_byte(data: bytes, window: bytes) -> None:
    def probability(byte: int, context: bytes) -> float:
        pairs = Counter(zip(*(data[i:] for i in range(len(context) + 1)), strict=False))
        seen = sum(n for run, n in pairs.items() if run[:-1] == tuple(context))
        shorter = probability(byte, context[1:]) if context else 1 / 256
        return (pairs[(*context, byte)] + 16 * shorter) / (seen + 16)

    for order in (0, 1):
        expected = [
            -math.log2(probability(window[i], window[max(0, i - order) : i]))
            for i in range(1, len(window))
        ]
        bits = ByteModel(text_of(data), order=order).bits(text_of(window).long()[None])
        assert bits == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def test_byte_model_of_order_2_starts_a_window_with_one_byte_of_context() -> None:
    text = text_of(b"abcabdabc" * 5)
    pairs, triples = ByteModel(text, order=1), ByteModel(text, order=2)
    window = text_of(b"abd").long()[None]
    expected = [pairs.probabilities[97, 98], triples.probabilities[97, 98, 100]]
    assert torch.equal(triples.predictions(window), torch.stack(expected)[None])


def test_byte_model_refuses_a_table_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="got 3"):
        ByteModel(text_of(b"abc"), order=3)
