"""BERT and the classifier of images without a GPU: tiny models, their data, and attentions that agree."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from benchmarks import curves, training_worker
from benchmarks.encoder_tables import encoder_claims
from benchmarks.training_tasks import BERT, PADDED, PATHS, TASKS
from benchmarks.training_worker import train_bert, train_paths
from flashgen.tuning.workloads import preset
from tests.benchmarks.rows import training_row

# the modules of examples/ are found once training_worker is imported
import attentions  # isort: skip
import corpus  # isort: skip
import paths  # isort: skip

SHAPE = train_bert.Shape(layers=2, nheads=2, width=32, vocabulary=320, seqlen=32)
TINY_BERT = train_bert.Options(attention="standard", seqlen=32, tokens=128, steps=6, device="cpu", shape=SHAPE)
IMAGES = paths.Images(size=20, length=10, thickness=1, distractors=1)
TINY_PATHS = train_paths.Options(
    attention="standard",
    seqlen=400,
    tokens=800,
    steps=4,
    device="cpu",
    images=IMAGES,
    shape=train_paths.Shape(layers=1, nheads=2, width=16),
)
TEXT = b"\n".join(b"def name_%d(one, two):\n    return one + %d * two" % (n, n) for n in range(60)) + b"\nx = 1\n"


@pytest.fixture(autouse=True)
def text(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A short text, and one thread: more of them take turns with those of other tests at every tiny product."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(corpus, "load_bytes", lambda: TEXT)
    corpus.load_corpus.cache_clear()
    monkeypatch.setattr(train_bert, "RATE", 1e-2)
    monkeypatch.setattr(train_bert, "RATE_STEPS", 1)
    monkeypatch.setattr(train_bert, "SHORTEST", 8)
    yield
    corpus.load_corpus.cache_clear()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("padded", [False, True])
def test_bert_learns_and_its_attention_does_not_matter(padded: bool) -> None:
    standard, torchs = (
        train_bert.train(replace(TINY_BERT, attention=attention, padded=padded)) for attention in ("standard", "sdpa")
    )
    for result in (standard, torchs):
        assert (result.outcome, len(result.losses), result.tokens) == ("done", 6, 128)
        assert result.losses[0] == pytest.approx(torch.log(torch.tensor(320.0)).item(), abs=0.3)
        assert result.losses[-1] < result.losses[0] - 0.5
    assert (curves.deviation(standard.losses, torchs.losses) or 0) < 0.02


def test_bert_is_as_large_as_bert_large() -> None:
    with torch.device("meta"):
        model = train_bert.Bert(train_bert.Shape(), attentions.encoder_attention("sdpa"))
    # BertForMaskedLM of bert-large-uncased has 335,174,458; six more tokens have a row and a bias each
    assert sum(p.numel() for p in model.parameters()) == 335_174_458 + 6 * 1025
    assert (BERT.tokens, BERT.workload.seqlen_q) == (train_bert.TOKENS, train_bert.SEQLEN)


def test_frequent_pieces_are_tokens_and_others_are_spelt() -> None:
    found = corpus.load_corpus(262)
    frequent = [b"one", b"return", b"two", b" ", b"("]
    assert len(found.starts) == 60 + 1, "a document for each function"
    first = found.tokens[: found.starts[1]].tolist()
    assert max(first) < 262
    spelt = bytes(token - corpus.FIRST_BYTE for token in first if token < corpus.FIRST_PIECE)
    assert spelt.startswith(b"def")
    assert not any(piece in spelt for piece in frequent[3:4])


def test_a_seventh_of_the_tokens_is_masked_and_padding_never_is() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([100, 20, 57])
    there = torch.arange(100) < lengths[:, None]
    original = torch.where(there, torch.randint(258, 300, (3, 100), generator=generator), corpus.PAD)
    inputs, places, targets = train_bert.masked_tokens(original, lengths, 300, generator)
    assert places.shape == targets.shape == (3 * 15,)
    counted = targets != train_bert.IGNORED
    assert counted.view(3, 15).sum(1).tolist() == [15, 3, 8]
    assert torch.equal(original.flatten()[places[counted]], targets[counted])
    changed = (inputs != original).flatten().nonzero().flatten()
    assert set(changed.tolist()) <= set(places[counted].tolist())
    assert 0.5 < (inputs.flatten()[places[counted]] == corpus.MASK).float().mean() < 1
    assert torch.equal(inputs[~there], torch.zeros_like(inputs[~there])), "padding stays"
    assert len(set(places.tolist())) == len(places)


def test_padded_sequences_are_whole_documents() -> None:
    text = corpus.load_corpus(320)
    inputs, _, _, lengths = next(train_bert.batches(text, replace(TINY_BERT, padded=True)))
    sizes = set(text.starts.diff().clamp(max=32).tolist())
    assert set(lengths.tolist()) <= sizes
    assert lengths.dtype == torch.int32
    assert all((row[length:] == corpus.PAD).all() for row, length in zip(inputs, lengths, strict=True))
    again = next(train_bert.batches(text, replace(TINY_BERT, padded=True)))
    assert torch.equal(inputs, again[0])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_every_attention_hides_the_same_keys() -> None:
    q, k, v = torch.randn(3, 3, 2, 128, 16, generator=torch.Generator().manual_seed(0)).unbind(0)
    exact = attentions.encoder_attention("standard")
    flex = attentions.encoder_attention("flex", compiled=True)  # not compiled here
    sdpa = attentions.encoder_attention("sdpa")
    for lengths in (torch.tensor([128, 5, 70]), torch.tensor([1, 128, 64])):
        expected = exact.call(q, k, v, exact.padding(lengths, 128))
        cut = exact.call(q[1:2], k[1:2, :, : lengths[1]], v[1:2, :, : lengths[1]], None)
        torch.testing.assert_close(expected[1:2], cut)
        for other in (flex, sdpa):
            torch.testing.assert_close(other.call(q, k, v, other.padding(lengths, 128)), expected)


def test_dots_lie_on_one_path_or_on_two() -> None:
    answers = torch.tensor([1, 0] * 20)
    pixels = paths.draw(IMAGES, answers, torch.Generator().manual_seed(0)).view(40, 20, 20)
    assert set(pixels.unique().tolist()) == {paths.NOTHING, paths.PATH, paths.DOT}
    assert (pixels == paths.DOT).flatten(1).sum(1).max() <= 2 * 21
    batches = [next(paths.batches(IMAGES, 4, seed)) for seed in (1, 1, 2)]
    assert torch.equal(batches[0][0], batches[1][0])
    assert not torch.equal(batches[0][0], batches[2][0])
    easy = paths.draw(replace(IMAGES, easy=True), answers, torch.Generator().manual_seed(0)).view(40, 20, 20)
    assert torch.equal(easy[1::2], pixels[1::2]), "what is not connected has two paths in either case"
    assert ((easy == paths.PATH).flatten(1).sum(1) < (pixels == paths.PATH).flatten(1).sum(1))[::2].float().mean() > 0.9
    long = paths.Images()
    x, y = paths._paths(long, 50, torch.Generator().manual_seed(0))
    for along in (x, y):
        assert along.min() >= paths.RADIUS
        assert along.max() < 128 - paths.RADIUS
        assert along.diff(dim=-1).abs().max() <= 1


def test_images_are_classified() -> None:
    result = train_paths.train(TINY_PATHS)
    assert (result.outcome, len(result.losses), len(result.accuracies)) == ("done", 4, 4)
    assert all(accuracy in (0.0, 0.5, 1.0) for accuracy in result.accuracies)
    same = train_paths.train(replace(TINY_PATHS, attention="sdpa"))
    assert (curves.deviation(result.losses, same.losses) or 0) < 0.02


def test_a_preset_tunes_what_bert_is_measured_on() -> None:
    assert preset("bert-large-training").workloads[:2] == (BERT.workload, PADDED.workload)


def test_tasks_name_the_models_of_the_examples() -> None:
    given = argparse.Namespace(steps=None, compiled_steps=7, run_seconds=None)
    for task in (BERT, PADDED, PATHS):
        for mode, steps in (("eager", task.steps), ("compiled", 7)):
            options = training_worker.run_of(f"{task.name}:flashgen:{mode}", given, 1e12)
            assert (options.steps, options.compile, options.limit_s) == (steps, mode == "compiled", task.run_seconds)
            workload, shape = task.workload, options.shape
            assert options.tokens == workload.batch * workload.seqlen_q
            assert (shape.nheads, shape.width // shape.nheads) == (workload.nheads, workload.head_dim)
    assert training_worker.run_of("bert-padded:flex:eager", given, 1e12).padded
    assert train_paths.Options().seqlen == PATHS.workload.seqlen_q
    assert len({suite for task in TASKS.values() for suite in task.suites.values()}) == 10


@pytest.mark.parametrize("example", [train_bert, train_paths])
def test_the_command_lines_of_the_examples(example: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        example.main(["--attention", "none"])  # type: ignore[attr-defined]
    assert "--attention" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("peers", "named"),
    [
        (["sdpa-flash"], "2.00 times the speed of SDPA flash, eager"),
        (["sdpa-flash", "sdpa-cudnn"], "2.00 times the speed of the fastest of SDPA cuDNN and SDPA flash, eager"),
    ],
)
def test_a_speed_names_the_peers_that_it_was_compared_with(peers: list[str], named: str) -> None:
    suite = PATHS.suites["eager"]
    mine = replace(training_row(suite, PATHS.name, "flashgen", 200.0), accuracy=1.0, steps=9)
    rows = [mine, *(training_row(suite, PATHS.name, peer, 100.0) for peer in peers)]
    (claim,) = encoder_claims(rows)
    assert claim[1].endswith(named)
