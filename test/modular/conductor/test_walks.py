"""Which workers are told what: placement of declarations, with known and with stepwise walk plans."""

import pytest
from support.composite.declarations import AUDIO, MAIN
from support.composite.deployment import CONFIG, PLACEMENTS
from support.composite.model import CompositeModel
from support.stepwise_model import PLACEMENT, SINGING_PLACEMENT, SingingModel, StepwiseModel

from mstar.communication.messages import OpenRequest, SamplingParams
from mstar.conductor.events import RequestStream
from mstar.conductor.request import GenerateRequest, PromptInput
from mstar.conductor.request_table import RequestRecord
from mstar.conductor.walks import PlacementError, WalkDirectory
from mstar.model.base import ModelSetup, PreparedPrompt

OPENING = OpenRequest(sampling=SamplingParams())


def composite(placement: str) -> WalkDirectory:
    return WalkDirectory(CompositeModel(ModelSetup(CONFIG, None, 64)), PLACEMENTS[placement])


def stepwise() -> WalkDirectory:
    return WalkDirectory(StepwiseModel(ModelSetup({}, None, 64)), PLACEMENT)


def record_of(walks: WalkDirectory, **metadata: int) -> RequestRecord:
    partitions, _ = walks.plan(PreparedPrompt(None, step_metadata=metadata), 4)
    stream = RequestStream(GenerateRequest("", (PromptInput("native"),)), 0.0)
    return RequestRecord("r", stream, 0, 1, metadata, partitions, walks.ranks_of(partitions))


@pytest.mark.parametrize(
    ("placement", "main", "audio"),
    [
        ("one_worker", (0,), (0,)),
        ("codec_apart", (0,), (1,)),
        ("language_apart", (0, 1), (1,)),
        ("three_workers", (0, 1), (2,)),
    ],
)
def test_a_partition_is_where_its_nodes_are(placement: str, main: tuple[int, ...], audio: tuple[int, ...]):
    walks = composite(placement)
    assert walks.ranks_of_partition == {MAIN: main, AUDIO: audio}
    assert walks.all_ranks == tuple(sorted({*main, *audio}))


def test_emitted_signals_have_their_modality_and_text_its_partition():
    walks = composite("three_workers")
    assert walks.modality_of == {"token": "text", "latent": "image", "audio": "audio"}
    assert walks.text_partition == MAIN


def test_a_node_without_a_rank_is_named():
    with pytest.raises(PlacementError, match="SPEAKER"):
        WalkDirectory(StepwiseModel(ModelSetup({}, None, 64)), {"THINKER": 0})


def test_a_known_plan_starts_every_partition_with_all_its_walks():
    walks = composite("codec_apart")
    record = record_of(walks)
    messages = walks.start(record, None)
    assert [(rank, m.partition, m.walks, m.last, m.open) for rank, m in messages] == [
        (0, MAIN, ("prefill", "speak", "paint"), True, None),
        (1, AUDIO, (), True, None),
    ]
    assert walks.plan(PreparedPrompt(None), 9)[1] == {"speak_steps": 8}
    record.partitions[MAIN].waiting.clear()
    assert walks.advance(record, MAIN) == []
    assert record.partitions[MAIN].is_done and not record.partitions[AUDIO].is_done


def test_the_opening_rides_with_the_first_message_of_a_request_on_one_worker():
    walks = composite("one_worker")
    messages = walks.start(record_of(walks), OPENING)
    assert [m.open for _, m in messages] == [OPENING, None]


def test_without_a_plan_the_model_names_each_walk():
    walks = stepwise()
    record = record_of(walks, thoughts=2)
    assert [(rank, m.walks, m.last) for rank, m in walks.start(record, None)] == [
        (0, ("think",), False),
        (1, ("think",), False),
    ]
    progress = record.partitions["main"]
    told = []
    while not progress.is_done:
        assert progress.waiting == {0, 1}, "every worker of the partition reports every walk"
        progress.waiting.clear()
        told.append([(rank, m.walks, m.limits) for rank, m in walks.advance(record, "main")])
    assert told == [
        [(0, ("think",), {}), (1, ("think",), {})],
        [(0, ("speak",), {"words": 1}), (1, ("speak",), {"words": 1})],
        [],
    ]
    assert progress.walks_done == ("think", "think", "speak")


def test_workers_hear_of_the_end_where_streams_depend_on_it():
    walks = WalkDirectory(SingingModel(ModelSetup({}, None, 64)), SINGING_PLACEMENT)
    record = record_of(walks)
    assert [(m.partition, m.walks, m.last) for _, m in walks.start(record, None)] == [
        ("main", ("think",), False),
        ("main", ("think",), False),
        ("choir", (), True),
    ]
    main = record.partitions["main"]
    walks.advance(record, "main")
    assert [(rank, m.walks, m.last) for rank, m in walks.advance(record, "main")] == [(0, (), True), (1, (), True)]
    assert (main.waiting, main.is_done) == ({0, 1}, False)
    assert walks.advance(record, "main") == []
    assert main.is_done


def test_a_stopped_partition_is_asked_no_more():
    walks = stepwise()
    record = record_of(walks, thoughts=5)
    record.partitions["main"].reason = "stop"
    assert walks.advance(record, "main") == []
    assert record.partitions["main"].is_done
